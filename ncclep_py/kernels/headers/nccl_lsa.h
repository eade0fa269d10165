// NCCL's Device API as far as ranks that address each other's memory need it, as NVRTC can read it. NCCL 2.30.7, 2.31.2 and 2.32.3.
#pragma once
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda.h>
#include <cuda/atomic>

// No network back ends: they need host constants, and their structs have other sizes here.
#define NCCL_GIN_PROXY_ENABLE 0
#define NCCL_GIN_GPI_ENABLE 0
#define NCCL_GIN_EFA_GDA_ENABLE 0
#define NCCL_GIN_GDAKI_ENABLE 0

// Until 2.31 NCCL declares host functions here, which NVRTC refuses: as device functions that nobody calls they do no harm.
#undef __host__
#define __host__

#include <nccl.h>
#if NCCL_VERSION_CODE < 23100   // its loadConst has arrays of size zero; later ones load plainly, too
#define loadConst load_const_of_nccl
#include <nccl_device/utility.h>
#undef loadConst
namespace nccl { namespace utility {
template <typename T> NCCL_DEVICE_INLINE T loadConst(T const* p) { return *p; }
} }
#endif
#include <nccl_device/impl/comm__funcs.h>
#include <nccl_device/impl/core__funcs.h>
#include <nccl_device/impl/ptr__funcs.h>
