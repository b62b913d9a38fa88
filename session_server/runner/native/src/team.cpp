#include "team.h"

#include <chrono>

#if defined(__linux__)
#include <sched.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace session_server {

namespace {

// How long a member waits awake. A thread that sleeps is often woken on the core of the thread that
// wakes it, and both then share one core for milliseconds: so members stay awake from step to step,
// and give their core to whoever else wants it meanwhile.
constexpr std::chrono::microseconds kAwakeInStep{10'000};
constexpr std::chrono::microseconds kAwakeBetweenSteps{1'000};
constexpr int kSpins = 300;  // before the core is offered to others

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#if defined(__linux__)
int current_cpu() { return sched_getcpu(); }

// Go to a CPU that is none of `taken`, if this thread may run on one.
void leave(const cpu_set_t& taken) {
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    CPU_AND(&others, &allowed, &taken);
    CPU_XOR(&others, &allowed, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
}
#endif

void wait_while(std::atomic<int>& value, int old, std::chrono::microseconds awake) {
    const auto until = std::chrono::steady_clock::now() + awake;
    do {
        for (int i = 0; i < kSpins; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
        std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < until);
    value.wait(old, std::memory_order_acquire);
}

}  // namespace

void Member::meet() {
    const int meeting = team_.meetings_.load(std::memory_order_relaxed);
    if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        team_.arrived_.store(0, std::memory_order_relaxed);
        team_.next_.store(0, std::memory_order_relaxed);
        team_.meetings_.store(meeting + 1, std::memory_order_release);
        team_.meetings_.notify_all();
        return;
    }
    // A spurious return is none: the value has changed.
    while (team_.meetings_.load(std::memory_order_acquire) == meeting) {
        wait_while(team_.meetings_, meeting, kAwakeInStep);
    }
}

Team::Team(int num_threads) : cpus_(num_threads) {
    try {
        for (int index = 1; index < num_threads; ++index) {
            threads_.emplace_back([this, index] { serve(index); });
        }
    } catch (...) {  // std::system_error: the system starts no more threads
        end();
        throw;
    }
}

Team::~Team() { end(); }

void Team::end() {
    is_closing_ = true;
    runs_.fetch_add(1, std::memory_order_release);
    runs_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Team::run(bool is_parallel, const std::function<void(Member&)>& work) {
    if (!is_parallel || threads_.empty()) {
        Member alone(*this, 0, 1);
        work(alone);
        return;
    }
    // Members wait for each other: one that threw would leave the others in the middle of a step.
    const std::function<void(Member&)> safe = [&](Member& member) noexcept { work(member); };
    work_ = &safe;
    arrive(0);
    runs_.fetch_add(1, std::memory_order_release);
    runs_.notify_all();
    Member caller(*this, 0, size());
    safe(caller);
    caller.meet();
}

void Team::arrive(int index) {
#if defined(__linux__)
    const int cpu = current_cpu();
    cpu_set_t taken;
    CPU_ZERO(&taken);
    for (int before = 0; before < index; ++before) {
        CPU_SET(cpus_[before].load(std::memory_order_relaxed), &taken);
    }
    const bool is_shared = CPU_ISSET(cpu, &taken);
    if (is_shared) leave(taken);
    cpus_[index].store(is_shared ? current_cpu() : cpu, std::memory_order_relaxed);
#endif
}

void Team::serve(int index) {
    for (int seen = 0;; ++seen) {
        while (runs_.load(std::memory_order_acquire) == seen) {
            wait_while(runs_, seen, kAwakeBetweenSteps);
        }
        if (is_closing_) return;
        arrive(index);
        Member member(*this, index, size());
        (*work_)(member);
        member.meet();
    }
}

}  // namespace session_server
