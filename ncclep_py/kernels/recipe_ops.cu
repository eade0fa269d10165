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

// Eight lanes have a block of 128 columns, so a warp has four blocks at once, a stretch.
OP ep_quantise_row(i64 window, i64 slot, i64 slot_scales, i64 tokens, i64 token, i64 first, i64 num_topk, i64 num_experts, i64 num_ranks,
                   i64 plane_rows, i64 row_bytes, i64 round_scales, i64 begin_stretch, i64 end_stretch) {
  const int STRETCHES = 4;   // in flight
  const int* rows = block_rows(num_experts) + (token - first) * num_topk;
  int row = lane() < num_topk ? rows[lane()] : -1;
  i64 rows_per_rank = num_experts / num_ranks * plane_rows;
  u64 mine = row_at(window, slot, row, rows_per_rank, row_bytes / 2);
  u64 my_scales = row_at(window, slot_scales, max(row, 0), rows_per_rank, row_bytes / 64);   // used only where there is a row
  u32 live = __ballot_sync(~0u, mine != 0);
  u64 source = tokens + token * row_bytes;
  int part = lane() & 7, end = 4 * int(end_stretch);
  for (int b = 4 * int(begin_stretch); b < end && live; b += 4 * STRETCHES) {
    uint4 held[STRETCHES][2], made[STRETCHES];
    float block_scale = 0.f;   // lane l: of block b + l
    #pragma unroll
    for (int j = 0; j < STRETCHES; ++j) {
      int block = b + 4 * j + (lane() >> 3);
      if (block < end) {
        u64 at = source + 256 * block + 32 * part;
        held[j][0] = load_nc(at), held[j][1] = load_nc(at + 16);
      } else {
        held[j][0] = held[j][1] = make_uint4(0, 0, 0, 0);
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
  return 0;
}
