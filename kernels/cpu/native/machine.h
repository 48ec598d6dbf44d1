// What computes: threads, and the kernels of the instruction set they use.
#pragma once

#include <algorithm>
#include <memory>
#include <string>

#include "huge_buffer.h"
#include "kernels.h"
#include "thread_pool.h"

namespace outrider {

struct Machine {
    Machine(int num_threads, const std::string& instruction_set)
        : pool(num_threads), kernels(kernels_for(instruction_set)) {}

    // Memory for each thread, kept from call to call; only a running program may write it. Not for several callers at
    // a time: Python's lock sees to that.
    std::shared_ptr<const HugeBuffer> scratch(size_t bytes_each) {
        const size_t num_bytes = pool.num_threads() * bytes_each;
        if (!scratch_ || scratch_->size() < num_bytes) scratch_ = std::make_shared<const HugeBuffer>(num_bytes);
        return scratch_;
    }

    ThreadPool pool;
    const Kernels& kernels;

  private:
    std::shared_ptr<const HugeBuffer> scratch_;
};

// How a linear layer's work is cut: bites of panels, times blocks of rows that stay in a core's cache meanwhile.
class LinearChunks {
  public:
    LinearChunks(int num_units, size_t unit_bytes, int num_rows, int row_tile)
        : num_units_(num_units),
          units_(static_cast<int>(std::max<size_t>(1, kBiteBytes / std::max<size_t>(1, unit_bytes)))),
          num_tiles_((num_rows + row_tile - 1) / row_tile),
          tiles_(std::max(1, kBlockRows / row_tile)),
          num_bites_((num_units + units_ - 1) / units_) {}

    int count() const { return num_bites_ * ((num_tiles_ + tiles_ - 1) / tiles_); }

    // Calls work(begin, end, first_tile, last_tile) for one chunk.
    template <typename Work>
    void run(int chunk, Work&& work) const {
        const int begin = chunk % num_bites_ * units_, first_tile = chunk / num_bites_ * tiles_;
        work(begin, std::min(begin + units_, num_units_), first_tile, std::min(first_tile + tiles_, num_tiles_));
    }

  private:
    // Measured on 2 cores: smaller bites cost more claims, larger ones leave a thread waiting for the other's last.
    static constexpr size_t kBiteBytes = 24 * 1024;
    static constexpr int kBlockRows = 64;

    int num_units_;
    int units_;
    int num_tiles_;
    int tiles_;
    int num_bites_;
};

}  // namespace outrider
