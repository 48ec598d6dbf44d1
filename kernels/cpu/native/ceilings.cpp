#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "machine.h"

namespace outrider {

namespace {

// Every thread does a part of the steps, in several pieces, so that one that lost its core does not stand for all.
int64_t multiply(Machine& machine, int64_t (*loop)(int64_t), int64_t num_steps) {
    constexpr int kPieces = 16;
    const int num_chunks = machine.pool.num_threads() * kPieces;
    const int64_t steps = (num_steps + num_chunks - 1) / num_chunks;
    const auto done = std::make_shared<std::atomic<int64_t>>(0);
    machine.pool.run([=](Team& team) { team.parallel_for(num_chunks, [&](int) { done->fetch_add(loop(steps)); }); });
    return done->load();
}

}  // namespace

void read_memory(Machine& machine, const uint8_t* data, size_t num_bytes) {
    constexpr size_t kPiece = size_t{1} << 20;
    const auto read = machine.kernels.ceilings.read;
    const int num_chunks = static_cast<int>((num_bytes + kPiece - 1) / kPiece);
    machine.pool.run([=](Team& team) {
        team.parallel_for(num_chunks, [&](int chunk) {
            const size_t begin = chunk * kPiece;
            read(data + begin, std::min(kPiece, num_bytes - begin));
        });
    });
}

int64_t multiply_int8(Machine& machine, int64_t num_steps) {
    return multiply(machine, machine.kernels.ceilings.multiply_int8, num_steps);
}

int64_t multiply_f32(Machine& machine, int64_t num_steps) {
    return multiply(machine, machine.kernels.ceilings.multiply_f32, num_steps);
}

}  // namespace outrider
