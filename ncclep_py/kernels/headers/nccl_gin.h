// NCCL's network calls (GIN), only declared: their bodies are in libnccl_device.ltoir of the same NCCL, because NVRTC cannot compile them (host
// constants of two back ends, bit fields of another size). NCCL 2.32.
#pragma once
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda.h>
#include <cuda/atomic>

// Names in the library are mangled, and its compiler's 64-bit integers are `long`, NVRTC's `long long`.
typedef unsigned long nccl_u64;
typedef long nccl_i64;
#define uint64_t nccl_u64
#define int64_t nccl_i64

#undef __host__
#define __host__
#include <nccl.h>
#if NCCL_VERSION_CODE < 23200
#error NCCL 2.32 or newer is needed for several teams of ranks
#endif
#define typeof __typeof__
#include <nccl_device/utility.h>
#include <nccl_device/coop.h>
// What has a body in the headers stays inline; what has none must not, or it would be asked for here.
#undef NCCL_DEVICE_INLINE
#undef NCCL_HOST_DEVICE_INLINE
#define NCCL_DEVICE_INLINE __device__ __attribute__((weak))
#define NCCL_HOST_DEVICE_INLINE __device__ __attribute__((weak))
#include <nccl_device/core.h>
#undef NCCL_DEVICE_INLINE
#define NCCL_DEVICE_INLINE __device__ __forceinline__
#include <nccl_device/gin/gin_device_common.h>
#undef NCCL_DEVICE_INLINE
#define NCCL_DEVICE_INLINE __device__ __attribute__((weak))
#include <nccl_device/gin.h>
#include <nccl_device/impl/core__types.h>
#include <nccl_device/impl/comm__types.h>
#include <nccl_device/impl/gin__types.h>
__device__ void ncclCoopAnyInitThread(ncclCoopAny* coop);
#undef uint64_t
#undef int64_t
