// Who issues requests to one queue, as fibers: gin_room.cu is included before this, with its accesses made plain and a yield before each. Who runs next
// is drawn from a seed. Prints: requests issued, those that would have had to wait in the queue, requests given up, those issued by
// somebody who had given one up, and whether the peer is lost. A queue that stops may move again when it is too late.
struct Wire { u64 issued = 0, taken = 0, length = 0, stops_after = 0; } wire;   // one queue
static Queue queue;

struct Ticket {
  u64 all = wire.issued;
  bool good() { yield(); return wire.taken >= all; }
};

static u64 waited, given_up, out_of_order, room;
static int requests;
static void issue() {
  yield();
  if (wire.issued++ - wire.taken >= wire.length) ++waited;
  yield();
}
static void poster() {
  bool gave_up = false;
  for (int i = 0; i < requests; ++i) {
    if (claim(&queue, &queue.lost, room, DEADLINE, [] { yield(); return Ticket(); })) { issue(); count_after(&queue.issued); out_of_order += gave_up; }
    else ++given_up, gave_up = true;
  }
}

int main(int, char** words) {
  auto number = [&](int i) { return strtoull(words[i], nullptr, 10); };
  random_state = number(1) * 2654435761u + 88172645463325252u;
  int posters = int(number(2));
  requests = int(number(3)), room = number(4), wire.length = number(5), wire.stops_after = number(6);
  bool moves_again = number(7);
  for (int i = 0; i < posters; ++i) start(poster);
  for (steps = 0; running(); ++steps) {
    if (steps > 4000000) { puts("endless"); return 1; }
    resume_one();
    if (moves_again && queue.lost) wire.stops_after = -1;
    if (draw() % 8 == 0 && wire.taken < wire.issued && wire.taken < wire.stops_after) ++wire.taken;
  }
  printf("%llu %llu %llu %llu %llu\n", wire.issued, waited, given_up, out_of_order, queue.lost);
}
