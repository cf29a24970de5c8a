// Stands before the text of CUDA kernels when the host's compiler makes them: what NVRTC knows by
// itself. The emulator sets `emulated` before each thread goes on. The headers are C's
// (-nostdinc++), which take 0.07 s of each compilation; C++'s take 0.25.
#include <math.h>
#include <string.h>

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
// Memory of a block, which the emulator fills before each: the kernel's array is this one.
#define __shared__
alignas(16) extern long scratch[6144];
alignas(16) long scratch[6144];

#define __isGlobal(pointer) true
#define __builtin_assume(condition)

struct Index {
  unsigned x, y, z;
};
struct Emulated {
  Index thread, block, block_size, grid_size;
  unsigned shared;  // bytes of a block's memory
  void (*barrier)();
  void (*exchange)(void* value, unsigned long bytes, unsigned mask, int lane_bits);
};
static Emulated emulated;
extern "C" __attribute__((visibility("default"))) Emulated* acc_emulated() { return &emulated; }

#define threadIdx emulated.thread
#define blockIdx emulated.block
#define blockDim emulated.block_size
#define gridDim emulated.grid_size

extern "C" __attribute__((visibility("default"))) long* acc_shared() { return scratch; }
// Copies that a thread has begun, which has fewer, and which waits for them before another thread
// goes on. Until then it reads what was there before.
struct Copy {
  void* to;
  const void* from;
  unsigned long bytes;
};
static Copy copies[1024];
static unsigned copies_begun = 0;
static inline void copy_later(void* to, const void* from, unsigned long bytes) {
  if (copies_begun < sizeof copies / sizeof *copies) copies[copies_begun++] = {to, from, bytes};
}
static inline void copy_now() {
  for (unsigned i = 0; i < copies_begun; ++i) memcpy(copies[i].to, copies[i].from, copies[i].bytes);
  copies_begun = 0;
}

static inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulated.exchange(&mask, 0, mask, 0);
}
static inline void __syncthreads() { emulated.barrier(); }
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_bits) {
  emulated.exchange(&value, sizeof value, mask, lane_bits);
  return value;
}

template <class To, class From>
static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
static inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
static inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
static inline unsigned long __umul64hi(unsigned long a, unsigned long b) {
  return (unsigned long)((unsigned __int128)a * b >> 64);
}
static inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
