// Starts grids of all ranks at once and runs them to their ends. Follows the device sources.
struct Grid { int rank, blocks, warps; i64 kernel; i64 arguments[32]; };
typedef void (*Kernel)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64,
                       i64, i64, i64, i64, i64, i64);   // more arguments than a kernel takes do no harm
static Grid* starting;
static void entry() {
  i64* a = starting->arguments;
  ((Kernel)starting->kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18],
                             a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
  cur->done = true;
  for (;;) yield();
}
extern "C" void native_setup(int team_size, u64 seed) {
  team = team_size, random_state = seed * 2654435761u + 88172645463325252ull;
  signals.clear(), put_counts.clear(), wires.clear();
}
static int dying = -1;
static long dies_at;
extern "C" void native_fault(int rank, long after) { dying = rank, dies_at = steps + after; }   // the rank stops; what it issued lands
extern "C" void native_window(int rank, int window, u64 base) { bases[rank][window] = base; }
extern "C" const char* native_run(Grid* grids, int count, long limit) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::pair<std::unique_ptr<Fiber>, Grid*>> all;
  for (Grid* g = grids; g < grids + count; ++g)
    for (int b = 0; b < g->blocks; ++b) {
      blocks.emplace_back(new Block)->shared.assign(1 << 14, 0xdeadbeef);
      for (int w = 0; w < g->warps; ++w) {
        warps.emplace_back(new Warp);
        for (int t = 0; t < 32; ++t) {
          auto f = std::make_unique<Fiber>();
          f->stack.resize(1 << 16);
          f->thread = {unsigned(w * 32 + t)}, f->block_index = {unsigned(b)}, f->block_size = {unsigned(g->warps * 32)}, f->grid = {unsigned(g->blocks)};
          f->rank = g->rank, f->block = blocks.back().get(), f->warp = warps.back().get(), f->done = false;
          getcontext(&f->context);
          f->context.uc_stack.ss_sp = f->stack.data(), f->context.uc_stack.ss_size = f->stack.size(), f->context.uc_link = nullptr;
          makecontext(&f->context, entry, 0);
          all.emplace_back(std::move(f), g);
        }
      }
    }
  failure[0] = 0;
  size_t left = all.size();
  long end = steps + limit;
  for (bool first = true; left && !failure[0]; first = false, deliver())
    for (auto& [f, g] : all) {
      if (!f->done && f->rank == dying && steps >= dies_at) f->done = true, --left;
      if (f->done || (!first && draw() % 8 == 0)) continue;
      cur = f.get(), starting = g, ++steps;
      swapcontext(&host, &f->context);
      left -= f->done;
      if (steps > end) snprintf(failure, sizeof failure, "kernels do not end");
      if (failure[0]) break;
    }
  return failure;
}
