// Memory that a kernel needs while it runs: kept per thread and reused, so that steady state
// allocates nothing. A slot grows to the largest size asked for.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>

// 64-byte aligned, contents undefined. `Slot` is any type: one buffer per type and thread.
template <class Slot, class T = char> T* scratch(std::size_t count) {
  struct Buffer {
    void* data = nullptr;
    std::size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  const std::size_t size = (count * sizeof(T) + 63) / 64 * 64;
  if (size > buffer.size) {
    std::free(buffer.data);
    buffer.size = 0;
    buffer.data = std::aligned_alloc(64, size);
    if (!buffer.data) throw std::bad_alloc();
    buffer.size = size;
  }
  return static_cast<T*>(buffer.data);
}
