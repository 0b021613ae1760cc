// What every operation file needs: its binding hook, addresses from Python, threads.
#pragma once
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace nb = nanobind;

// Every binding releases the GIL: def("name", &f, Unlocked(), "docstring").
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// Python passes data_ptr() integers: a call costs about a microsecond less than with array
// objects. Shapes and types are checked once, by the Python wrapper.
using Address = std::uintptr_t;
template <class T> inline T* at(Address a) { return reinterpret_cast<T*>(a); }

// Threads of the next parallel region: `#pragma omp parallel num_threads(threads())`.
// set_threads(0) means OpenMP's own default. torch's OpenMP runtime is shared.
inline int& thread_setting() {
  static int count = 0;
  return count;
}
inline int threads() {
#ifdef _OPENMP
  return thread_setting() > 0 ? thread_setting() : omp_get_max_threads();
#else
  return 1;
#endif
}
inline int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}
inline int team_size() {
#ifdef _OPENMP
  return omp_get_num_threads();
#else
  return 1;
#endif
}
