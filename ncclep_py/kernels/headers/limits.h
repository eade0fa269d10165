// Stand-in: NVRTC has no host headers, and NCCL includes this one.
#pragma once
#include <cuda/std/climits>
