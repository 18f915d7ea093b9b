// The part of the standard library that the kernels use, for NVRTC, which has none.
#pragma once

typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;

namespace std {

__device__ __forceinline__ float abs(float x) { return fabsf(x); }
__device__ __forceinline__ double abs(double x) { return fabs(x); }
__device__ __forceinline__ float floor(float x) { return floorf(x); }
__device__ __forceinline__ double floor(double x) { return ::floor(x); }

template <typename T>
struct numeric_limits;
template <>
struct numeric_limits<int32_t> {
  __device__ static int32_t max() { return 0x7fffffff; }
};
template <>
struct numeric_limits<float> {
  __device__ static float max() { return __int_as_float(0x7f7fffff); }
  __device__ static float infinity() { return __int_as_float(0x7f800000); }
  __device__ static float quiet_NaN() { return __int_as_float(0x7fc00000); }
};
template <>
struct numeric_limits<double> {
  __device__ static double max() { return __longlong_as_double(0x7fefffffffffffffLL); }
  __device__ static double infinity() { return __longlong_as_double(0x7ff0000000000000LL); }
  __device__ static double quiet_NaN() { return __longlong_as_double(0x7ff8000000000000LL); }
};

}  // namespace std
