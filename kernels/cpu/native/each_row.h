// Work on rows that Python hands in, shared out among the threads.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>

#include "machine.h"

namespace outrider {

// Runs row_work(row) for each row, several rows a chunk.
template <typename RowWork>
void each_row(Machine& machine, pybind11::ssize_t num_rows, RowWork row_work) {
    constexpr int kRows = 4;
    const int rows = static_cast<int>(num_rows);
    const pybind11::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for((rows + kRows - 1) / kRows, [&](int chunk) {
            for (int row = chunk * kRows; row < std::min(rows, (chunk + 1) * kRows); ++row) row_work(row);
        });
    });
}

}  // namespace outrider
