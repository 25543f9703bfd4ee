// Marks functions that GPU code calls too. Nothing for other compilers.
#pragma once

#ifdef __CUDACC__
#define AKV_HOST_DEVICE __host__ __device__
#else
#define AKV_HOST_DEVICE
#endif
