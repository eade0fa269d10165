// Stand-in: NVRTC has no host headers; NCCL includes this one and device code uses nothing of it.
#pragma once
