// Operations of the quantisation recipes. Declared, with scope and memory order, in ops.py; follows fabric_ops.cu in one NVRTC program.
INLINE u32 e4m3_pair(float low, float high) {   // nearest even, held within +-448
#if __CUDA_ARCH__ >= 890
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#else
  return 0;   // never runs: compiled.py refuses the recipe on these architectures
#endif
}
INLINE u32 e4m3_quad(u32 a, u32 b, float scale) {   // two pairs of bf16
  return e4m3_pair(__fmul_rn(__uint_as_float(a << 16), scale), __fmul_rn(__uint_as_float(a & 0xffff0000u), scale)) |
         e4m3_pair(__fmul_rn(__uint_as_float(b << 16), scale), __fmul_rn(__uint_as_float(b & 0xffff0000u), scale)) << 16;
}
INLINE u32 largest(uint4 v) { return __vmaxu2(__vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff), __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff)); }

// Eight lanes have a block of 128 columns, so a warp has four blocks at once, a stretch. `mine`, `my_scales`: where the row and its scales go, of the
// lanes in `live`. Vectors of 16 bytes from block `begin` up to `staged` are in shared memory already, at `fetched`.
INLINE void quantise(u64 source, u64 mine, u64 my_scales, u32 live, int round_scales, int begin, int end, u32 fetched, int staged) {
  const int STRETCHES = 4;   // in flight
  int part = lane() & 7;
  for (int b = begin; b < end && live; b += 4 * STRETCHES) {
    uint4 held[STRETCHES][2], made[STRETCHES];
    float block_scale = 0.f;   // lane l: of block b + l
    #pragma unroll
    for (int j = 0; j < STRETCHES; ++j) {
      int block = b + 4 * j + (lane() >> 3);
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        int at = 16 * block + 2 * part + half;
        if (block >= end) held[j][half] = make_uint4(0, 0, 0, 0);
        else if (at < staged) held[j][half] = load_shared(fetched + 16 * (at - 16 * begin));
        else held[j][half] = load_nc(source + 16 * at);
      }
    }
    #pragma unroll
    for (int j = 0; j < STRETCHES; ++j) {
      u32 pair = __vmaxu2(largest(held[j][0]), largest(held[j][1])), most = max(pair >> 16, pair & 0xffff);
      #pragma unroll
      for (int step = 1; step < 8; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
      float amax = fmaxf(__uint_as_float(most << 16), 1e-4f), stored = __fmul_rn(amax, 1.f / 448.f), scale = __fdiv_rn(448.f, amax);
      if (round_scales) {
        u32 bits = __float_as_uint(stored), exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);
        stored = __uint_as_float(exponent << 23), scale = __uint_as_float((254 - exponent) << 23);
      }
      uint4 low = held[j][0], high = held[j][1];
      made[j] = make_uint4(e4m3_quad(low.x, low.y, scale), e4m3_quad(low.z, low.w, scale),
                           e4m3_quad(high.x, high.y, scale), e4m3_quad(high.z, high.w, scale));
      float of_block = __shfl_sync(~0u, stored, (lane() & 3) * 8);
      if (lane() >> 2 == j) block_scale = of_block;
    }
    for (u32 left = live; left; left &= left - 1) {
      u64 to = __shfl_sync(~0u, mine, __ffs(left) - 1), scales_to = __shfl_sync(~0u, my_scales, __ffs(left) - 1);
      #pragma unroll
      for (int j = 0; j < STRETCHES; ++j) {
        int block = b + 4 * j + (lane() >> 3);
        if (block < end) store_row(to + 128 * block + 16 * part, made[j]);
      }
      if (lane() < 4 * STRETCHES && b + lane() < end) *(float*)(scales_to + 4 * (b + lane())) = block_scale;
    }
  }
}
OP ep_quantise_row(i64 window, i64 slot, i64 slot_scales, i64 tokens, i64 token, i64 fetched, i64 first, i64 reserved, i64 num_topk,
                   i64 num_experts, i64 num_ranks, i64 plane_rows, i64 row_bytes, i64 round_scales, i64 begin_stretch, i64 end_stretch) {
  const int* rows = block_rows(num_experts) + (token - first) * num_topk;
  int row = lane() < num_topk ? rows[lane()] : -1;
  i64 rows_per_rank = num_experts / num_ranks * plane_rows;
  u64 mine = row_at(window, slot, row, rows_per_rank, row_bytes / 2);
  u64 my_scales = row_at(window, slot_scales, max(row, 0), rows_per_rank, row_bytes / 64);   // used only where there is a row
  Staging held_back = staging(reserved);   // of fetch_row: 64 vectors a stretch, from begin_stretch on
  int staged = token == fetched ? 64 * int(begin_stretch) + held_back.vectors : 0;
  wait_copies();
  __syncwarp();   // another lane may have copied what I read
  quantise(tokens + token * row_bytes, mine, my_scales, __ballot_sync(~0u, mine != 0), int(round_scales), 4 * int(begin_stretch),
           4 * int(end_stretch), held_back.base, staged);
  return 0;
}

// ---- NVFP4 -------------------------------------------------------------------------------------------------------------------------------------
// A packed row: per 512 columns a stretch of 256 bytes of E2M1 and 32 E4M3 scales of 16 columns each, at the end the row's own fp32 scale. Stretch
// c lies before the bf16 columns of stretch c ends, so a warp packs a row in its own place, front to back.
#define PACKED_STRETCH 288
INLINE u32 e2m1(float y) {   // nearest even, held within +-6
  float m = fabsf(y);
  u32 code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f);
  return code | (__float_as_uint(y) >> 31 << 3);
}
INLINE u32 e2m1_octet(uint4 v, float inverse) {   // eight bf16
  u32 words[4] = {v.x, v.y, v.z, v.w}, made = 0;
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    made |= e2m1(__fmul_rn(__uint_as_float(words[j] << 16), inverse)) << (8 * j);
    made |= e2m1(__fmul_rn(__uint_as_float(words[j] & 0xffff0000u), inverse)) << (8 * j + 4);
  }
  return made;
}
INLINE float e4m3_value(u32 code) { return __uint_as_float(code << 20) * 0x1p120f; }   // not negative
INLINE float e2m1_value(u32 code) { return __uint_as_float((code & 7) << 22 | code >> 3 << 31) * 0x1p126f; }

OP ep_pack_rows(i64 window, i64 slot, i64 rank, i64 counters, i64 row_scales, i64 own_planes, i64 plane_capacity, i64 row_bytes) {
  int warps_of_all = int(gridDim.x) * warps(), me = int(blockIdx.x) * warps() + warp(), before = 0;
  u64 rows = peer_at(window, slot, rank);
  for (int plane = 0; plane < own_planes; ++plane) {
    int count = ((const int*)counters)[plane];
    for (int i = (me + warps_of_all - before % warps_of_all) % warps_of_all; i < count; i += warps_of_all) {
      i64 row = plane * plane_capacity + i;
      u64 at = rows + row * row_bytes;
      float g = ((const float*)row_scales)[row], inverse_g = g == 0.f ? 0.f : __frcp_rn(g);
      int stretches = int(row_bytes / 1024);
      for (int c = 0; c < stretches; ++c) {
        uint4 low = load_row(at + 1024 * c + 32 * lane()), high = load_row(at + 1024 * c + 32 * lane() + 16);
        __syncwarp();   // all have read before anybody writes
        u32 pair = __vmaxu2(largest(low), largest(high)), most = max(pair >> 16, pair & 0xffff);
        float f = __fmul_rn(g, __fmul_rn(__uint_as_float(most << 16), 1.f / 6.f));
        u32 scale = e4m3_pair(f, 0.f) & 0xff;
        float inverse = f == 0.f ? 0.f : __frcp_rn(__fmul_rn(e4m3_value(scale), inverse_g));
        u64 to = at + PACKED_STRETCH * c;
        *(uint2*)(to + 8 * lane()) = make_uint2(e2m1_octet(low, inverse), e2m1_octet(high, inverse));
        *(unsigned char*)(to + 256 + lane()) = (unsigned char)scale;
        __syncwarp();
      }
      if (lane() == 0) *(float*)(at + PACKED_STRETCH * stretches) = g;
      __syncwarp();
    }
    before += count;
  }
  return 0;
}
INLINE int sum_packed(u64 mine, i64 weights, i64 at, u64 result, i64 row_bytes, i64 begin_stretch, i64 end_stretch) {   // of the lanes that have a row
  float factor = 0.f;
  if (mine) {
    float g = *(const float*)(mine + PACKED_STRETCH * (row_bytes / 1024)), inverse_g = __fdiv_rn(1.f, g);
    factor = isinf(inverse_g) ? 1.f : inverse_g;
  }
  float weight = mine && weights ? load_weight(weights + 4 * at) : 1.f;
  u32 live = __ballot_sync(~0u, mine != 0);
  for (int c = int(begin_stretch); c < end_stretch; ++c) {
    float sum[16] = {};
    for (u32 left = live; left; left &= left - 1) {
      int k = __ffs(left) - 1;
      u64 from = __shfl_sync(~0u, mine, k) + PACKED_STRETCH * c;
      float inverse_g = __shfl_sync(~0u, factor, k), w = __shfl_sync(~0u, weight, k);
      uint2 held = *(const uint2*)(from + 8 * lane());
      u32 scale = *(const unsigned char*)(from + 256 + lane());
      float by = __fmul_rn(__fmul_rn(e4m3_value(scale), inverse_g), w);
      #pragma unroll
      for (int j = 0; j < 16; ++j) sum[j] = __fmaf_rn(e2m1_value((j < 8 ? held.x >> 4 * j : held.y >> 4 * (j - 8)) & 15), by, sum[j]);
    }
    u64 to = result + 1024 * c + 32 * lane();
    store_row(to, make_uint4(Vector<0>::pack(sum, 0), Vector<0>::pack(sum, 1), Vector<0>::pack(sum, 2), Vector<0>::pack(sum, 3)));
    store_row(to + 16, make_uint4(Vector<0>::pack(sum, 4), Vector<0>::pack(sum, 5), Vector<0>::pack(sum, 6), Vector<0>::pack(sum, 7)));
  }
  return 0;
}
OP ep_sum_packed_row(i64 window, i64 slot, i64 table, i64 weights, i64 out, i64 token, i64 num_topk, i64 num_experts, i64 num_ranks, i64 plane_rows,
                     i64 row_bytes, i64 begin_stretch, i64 end_stretch) {
  i64 at = token * num_topk + lane();
  u64 mine = lane() < num_topk ? row_at(window, slot, ((const int*)table)[at], num_experts / num_ranks * plane_rows, row_bytes) : 0;
  return sum_packed(mine, weights, at, out + token * row_bytes, row_bytes, begin_stretch, end_stretch);
}
