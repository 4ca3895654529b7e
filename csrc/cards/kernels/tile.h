// The contract of matrix instructions. A team of neighbouring threads holds 16 x 16 sums: row r of
// the inputs times output w of the weights. An operand is 16 rows of 32 bytes (16 values of bf16 or
// f16) in shared memory. It is stored as two octets of 16-byte units; the unit of row r in octet o
// lies at units[first + o * octet_step + r]. There is one file per instruction family, and
// intrinsics and the lane layouts of instructions stay in those files. A tile type has
//
// - kExists: whether this target has the instructions. A device without them does not offer the
//   class, and its kernels only stop.
// - kLanes, kValues: the threads of a team, and the sums that each of them holds, 256 / kLanes.
// - Operand load(units, first, octet_step): all threads of the team call it, behind the barrier
// that
//   follows the stores.
// - multiply_add(Sums&, rows, weights): adds to sums[r, w] the sum over 16 inputs k of rows[r, k] *
//   weights[w, k]; products are exact, sums are float32.
// - row(i), column(i): which r and w value i of the calling thread is.
// - sync_team(): orders what the team's threads do with shared memory. All teams of a block call it
//   equally often.
//
// What an instruction does with row r of the inputs depends on that row and on the weights alone.
// In which order and how precisely it adds its 16 products is the vendor's. The simulator adds them
// in ascending order, each by one fma, so its sums are those of f32-canonical on such inputs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

#if defined(DFLASH_GPU_SIM)
#include "cards/kernels/tile_sim.h"
#elif defined(__HIP__) || defined(__HIPCC__)
#include "cards/kernels/tile_mfma.h"
#include "cards/kernels/tile_wmma.h"
#else
#include "cards/kernels/tile_mma.h"
#endif

namespace dflash::compute::gpu {

inline constexpr uint32_t kTileSide = 16;   // rows of a tile, and outputs
inline constexpr uint32_t kTileOctets = 2;  // 16-byte units of a row of an operand
inline constexpr uint32_t kUnitHalves = 8;  // 16-bit values of a unit

struct NoTile {
  static constexpr bool kExists = false;
};

// DFLASH_GPU_TILES(call, ...): `call<Tile, ...>` for the instructions of this target; the simulator
// has teams of 32 or 64 threads, as its device's waves.
#if defined(DFLASH_GPU_SIM)
#define DFLASH_GPU_TILES(call, ...)                             \
  (::dflash::compute::gpu::sim::thread_place().wave_width == 64 \
       ? call<SimTile<64> __VA_OPT__(, ) __VA_ARGS__>           \
       : call<SimTile<32> __VA_OPT__(, ) __VA_ARGS__>)
#elif defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__)
#define DFLASH_GPU_TILES(call, ...) call<MfmaTile __VA_OPT__(, ) __VA_ARGS__>
#elif defined(__gfx1100__) || defined(__gfx1201__)
#define DFLASH_GPU_TILES(call, ...) call<WmmaTile __VA_OPT__(, ) __VA_ARGS__>
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define DFLASH_GPU_TILES(call, ...) call<MmaTile __VA_OPT__(, ) __VA_ARGS__>
#else
#define DFLASH_GPU_TILES(call, ...) call<NoTile __VA_OPT__(, ) __VA_ARGS__>
#endif

}  // namespace dflash::compute::gpu
