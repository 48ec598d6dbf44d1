#include "thread_pool.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

namespace outrider {

namespace {

// What a thread spins before it lets others have the core. In a pass the wait is for the last chunk of a phase, a
// few microseconds; between two steps it is the engine's own work, a few hundred.
constexpr int kPhaseSpins = 4000;
constexpr int kRunSpins = 20000;
constexpr auto kNap = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr uint64_t turn_of(uint64_t count) { return count >> 32; }

}  // namespace

int Team::claim(uint64_t phase, int num_chunks) {
    const int num_threads = pool_.num_threads_;
    const uint64_t turn = phase / ThreadPool::kSlots;
    for (int i = 0; i < num_threads; ++i) {
        const int owner = (thread_ + i) % num_threads;
        const auto begin = static_cast<uint64_t>(num_chunks) * owner / num_threads;
        const auto size = static_cast<uint64_t>(num_chunks) * (owner + 1) / num_threads - begin;
        std::atomic<uint64_t>& count = pool_.claimed(phase, owner);
        uint64_t claimed = count.load(std::memory_order_acquire);
        while (true) {
            if (turn_of(claimed) > turn) return -1;  // a later phase already uses the slot
            const uint64_t next = turn_of(claimed) == turn ? claimed & 0xffffffffu : 0;
            if (next >= size) break;
            if (count.compare_exchange_weak(claimed, (turn << 32) + next + 1, std::memory_order_acq_rel)) {
                return static_cast<int>(begin + next);
            }
        }
    }
    return -1;
}

int Team::finish(uint64_t phase, int num_chunks) {
    const uint64_t turn = phase / ThreadPool::kSlots;
    std::atomic<uint64_t>& count = pool_.done(phase);
    uint64_t done = count.load(std::memory_order_relaxed);
    uint64_t next;
    do {
        next = (turn_of(done) == turn ? done : turn << 32) + static_cast<uint64_t>(num_chunks);
    } while (!count.compare_exchange_weak(done, next, std::memory_order_acq_rel, std::memory_order_relaxed));
    return static_cast<int>(next & 0xffffffffu);
}

void Team::wait(uint64_t phase, int num_done) {
    const std::atomic<uint64_t>& count = pool_.done(phase);
    const uint64_t finished = ((phase / ThreadPool::kSlots) << 32) + static_cast<uint64_t>(num_done);
    for (int spins = 0; count.load(std::memory_order_acquire) < finished; ++spins) {
        // Sleeping, not yielding: the thread that holds the last chunk may be queued on this very core.
        spins < kPhaseSpins ? pause() : std::this_thread::sleep_for(kNap);
    }
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
    if (num_threads < 1 || num_threads > kMaxThreads) {
        throw std::invalid_argument("num_threads must be from 1 to " + std::to_string(kMaxThreads) + ", not " +
                                    std::to_string(num_threads));
    }
    counts_ = std::vector<Count>(kSlots * (num_threads + 1));
    try {
        for (int thread = 1; thread < num_threads_; ++thread) workers_.emplace_back(&ThreadPool::work, this, thread);
    } catch (const std::system_error&) {
        // The system gives no more threads: those there are do the missing ones' chunks.
    }
}

ThreadPool::~ThreadPool() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        num_runs_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(std::function<void(Team&)> program) {
    const std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
    const auto run = std::make_shared<const Run>(Run{std::move(program), next_phase_});
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        current_ = run;
        num_runs_.fetch_add(1);
    }
    if (num_asleep_.load() > 0) wake_.notify_all();
    Team team(*this, 0, run->first_phase);
    run->program(team);
    next_phase_ = team.phase_;
    const std::lock_guard<std::mutex> lock(mutex_);
    current_.reset();
}

void ThreadPool::work(int thread) {
    uint64_t seen = 0;
    while (true) {
        for (int spins = 0; num_runs_.load(std::memory_order_acquire) == seen && spins < kRunSpins; ++spins) pause();
        std::shared_ptr<const Run> run;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            num_asleep_.fetch_add(1);
            wake_.wait(lock, [&] { return num_runs_.load() != seen; });
            num_asleep_.fetch_sub(1);
            if (stopping_) return;
            seen = num_runs_.load();
            run = current_;
        }
        if (!run) continue;  // over before this thread woke
        Team team(*this, thread, run->first_phase);
        run->program(team);
    }
}

}  // namespace outrider
