// Threads that go through a step together.

#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace session_server {

class Team;

// One thread's place in a team, for the length of one `Team::run`.
class Member {
  public:
    int index() const { return index_; }
    int size() const { return size_; }

    // Call f(item) for items [0, count), each on one member, then wait for all members. Members
    // that come first take more items: a core that something else uses holds nobody up.
    template <class Function>
    void share(long count, Function&& f) {
        share(count, f, [] {});
    }

    // The same; a member that finds no more items calls before_wait() before it waits for the others.
    template <class Function, class Idle>
    void share(long count, Function&& f, Idle&& before_wait);

  private:
    friend class Team;
    Member(Team& team, int index, int size) : team_(team), index_(index), size_(size) {}
    void meet();

    Team& team_;
    int index_;
    int size_;
};

// A fixed number of threads, the caller included. The others sleep between runs, after a short
// spin: an idle server uses no CPU. Not thread-safe: one caller at a time.
class Team {
  public:
    // Throws std::system_error if the system starts no more threads.
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    // Run `work` on the caller and, if `is_parallel`, on all other threads; return when all did. Then
    // nothing may be thrown: it ends the process.
    void run(bool is_parallel, const std::function<void(Member&)>& work);

  private:
    friend class Member;
    void serve(int index);
    void end();
    // Note the CPU of a member, which moves if one before it is there: a thread is often woken where
    // the one runs that wakes it, and they would share a core while another idles.
    void arrive(int index);

    std::vector<std::thread> threads_;
    const std::function<void(Member&)>* work_ = nullptr;
    alignas(64) std::atomic<int> runs_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> meetings_{0};
    std::vector<std::atomic<int>> cpus_;  // where members were seen last
    bool is_closing_ = false;
};

template <class Function, class Idle>
void Member::share(long count, Function&& f, Idle&& before_wait) {
    if (size_ == 1) {
        for (long i = 0; i < count; ++i) f(i);
        return;
    }
    for (;;) {
        const long item = team_.next_.fetch_add(1, std::memory_order_relaxed);
        if (item >= count) break;
        f(item);
    }
    before_wait();
    meet();
}

}  // namespace session_server
