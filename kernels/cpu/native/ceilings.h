// What a machine can do at the most: loops that do nothing else, for `outrider bench kernels` to compare with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

struct Machine;

// One instruction set's loops, for one thread.
struct CeilingLoops {
    void (*read)(const uint8_t* from, size_t num_bytes);  // num_bytes: a multiple of 1024
    // Both return how many multiply-adds they did.
    int64_t (*multiply_int8)(int64_t num_steps);
    int64_t (*multiply_f32)(int64_t num_steps);
};

// The same on all threads of a machine. Read: each byte once, every thread a run of its own.
void read_memory(Machine& machine, const uint8_t* data, size_t num_bytes);
int64_t multiply_int8(Machine& machine, int64_t num_steps);
int64_t multiply_f32(Machine& machine, int64_t num_steps);

}  // namespace outrider
