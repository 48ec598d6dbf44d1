// Threads that work through phases together, and never wait for one that the system has put aside.
//
// All threads run the same program: a sequence of `parallel_for`s. A phase is cut into small chunks that threads
// claim one by one; it ends when its chunks are done, not when its threads are. So a thread that lost its core
// holds up the others only while it holds a chunk, and one that comes late walks through the finished phases
// and joins where work is left. (A static split with spinning barriers was 10 to 50 times slower as soon as
// another process wanted a core.)
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace outrider {

class ThreadPool;

// One thread's way through one run of a program.
class Team {
  public:
    int thread() const { return thread_; }  // 0 is the caller
    int num_threads() const;

    // Calls body(chunk) for every chunk of 0..num_chunks-1, each once, on some thread; returns when all are done.
    // Every thread must reach the same parallel_fors with the same counts in the same order.
    template <typename Body>
    void parallel_for(int num_chunks, Body&& body) {
        parallel_for(num_chunks, body, [] {});
    }

    // The same, and then calls last() once, on the thread that finished the last chunk: cheaper than another phase
    // for what is too little to share.
    template <typename Body, typename Last>
    void parallel_for(int num_chunks, Body&& body, Last&& last) {
        if (num_chunks <= 0) return;
        const uint64_t phase = phase_++;
        for (int chunk = claim(phase, num_chunks); chunk >= 0; chunk = claim(phase, num_chunks)) {
            body(chunk);
            if (finish(phase) == num_chunks) {
                last();
                finish(phase);
            }
        }
        wait(phase, num_chunks + 1);
    }

  private:
    friend class ThreadPool;
    Team(ThreadPool& pool, int thread, uint64_t first_phase) : pool_(pool), thread_(thread), phase_(first_phase) {}

    int claim(uint64_t phase, int num_chunks);
    int finish(uint64_t phase);  // one chunk more is done: how many are now
    void wait(uint64_t phase, int num_done);

    ThreadPool& pool_;
    const int thread_;
    uint64_t phase_;
};

class ThreadPool {
  public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }

    // Runs a program on all threads; one run at a time. A thread that comes late may still walk through the
    // program's phases after `run` has returned, so a program outside of chunk bodies touches only what it owns.
    void run(std::function<void(Team&)> program);

  private:
    friend class Team;

    // Phases are numbered for ever and share a ring of slots; `turn` says which of a slot's phases a count is of.
    struct alignas(64) Slot {
        std::atomic<uint64_t> claimed{0};  // turn << 32 | chunks given out
        std::atomic<uint64_t> done{0};     // turn << 32 | chunks finished
    };
    struct Run {
        std::function<void(Team&)> program;
        uint64_t first_phase;
    };
    static constexpr uint64_t kSlots = 1024;

    void work(int thread);

    const int num_threads_;
    std::vector<Slot> slots_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::shared_ptr<const Run> current_;   // under the mutex; null between runs
    std::atomic<uint64_t> num_runs_{0};    // written under the mutex
    std::atomic<int> num_asleep_{0};
    bool stopping_ = false;                // under the mutex
    uint64_t next_phase_ = kSlots;         // turn 0 is what fresh slots hold
    std::mutex run_mutex_;
};

inline int Team::num_threads() const { return pool_.num_threads(); }

}  // namespace outrider
