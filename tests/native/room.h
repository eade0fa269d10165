// Who issues requests to the queues of some peers, as fibers: gin_room.cu is included before this, with its accesses made plain and a yield before each.
// Who runs next is drawn from a seed. Prints: requests issued, those that would have had to wait in their queue, requests given up, those issued to a peer
// by somebody who had given one up, peers lost, and steps. Queues that stop may move again when it is too late.
struct Wire { u64 issued = 0, taken = 0; } wires[64];   // one per peer
static Queue queues[64];
static Limits limits;

struct Ticket {
  int peer;
  u64 all;
  explicit Ticket(int p) : peer(p), all(wires[p].issued) {}
  bool good() { yield(); return wires[peer].taken >= all; }
};

static u64 issued, waited, given_up, out_of_order, length, stops_after;
static int requests, peers;
static void issue(int peer) {
  yield();
  ++issued;
  if (wires[peer].issued++ - wires[peer].taken >= length) ++waited;
  yield();
}
static void poster() {
  std::vector<bool> gave_up(peers, false);
  for (int i = 0; i < requests; ++i) {
    int peer = i % peers;
    if (claim(&queues[peer], &queues[peer].lost, &limits, [&] { yield(); return Ticket(peer); })) {
      issue(peer);
      count_after(&queues[peer].issued);
      out_of_order += gave_up[peer];
    } else {
      ++given_up, gave_up[peer] = true;
    }
  }
}

int main(int, char** words) {
  auto number = [&](int i) { return strtoull(words[i], nullptr, 10); };
  random_state = number(1) * 2654435761u + 88172645463325252u;
  int posters = int(number(2));
  limits.timeout = DEADLINE, limits.least = DEADLINE / 30, limits.room = number(4);
  requests = int(number(3)), length = number(5), stops_after = number(6), peers = int(number(8));
  bool moves_again = number(7);
  u64 lost = 0;
  for (int i = 0; i < posters; ++i) start(poster);
  for (steps = 0; running(); ++steps) {
    if (steps > 4000000) { puts("endless"); return 1; }
    resume_one();
    for (int p = 0; p < peers; ++p)
      if (draw() % 8 == 0 && wires[p].taken < wires[p].issued && (wires[p].taken < stops_after || moves_again && queues[p].lost)) ++wires[p].taken;
  }
  for (int p = 0; p < peers; ++p) lost += queues[p].lost;
  printf("%llu %llu %llu %llu %llu %llu\n", issued, waited, given_up, out_of_order, lost, steps);
}
