// The extension module of one instruction set: binds every operation, reports the processor.
#include "ops.hpp"

#define OP(name) void bind_##name(nb::module_&);
#include "ops.inc"
#undef OP

// Which kernel sets this processor runs, best first. Asked of the portable module only.
static nb::list supported() {
  nb::list sets;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512bf16"))
    sets.append("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    sets.append("avx2");
#endif
  sets.append("portable");
  return sets;
}

NB_MODULE(GLMFLASH_MODULE, m) {
  m.doc() = "glmflash kernels of one instruction set";
  m.def("supported", &supported, "Kernel sets that this processor can run, best first.");
  m.def("set_threads", [](int count) { thread_setting() = count; },
        "Threads of every kernel; 0 is OpenMP's default.");
  m.def("threads", &threads, "Threads that a kernel uses now.");
#define OP(name) bind_##name(m);
#include "ops.inc"
#undef OP
}
