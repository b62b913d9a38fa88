#include <atomic>
#include <cstring>

#include "kernels.h"

namespace session_server {

#define SESSION_SERVER_DECLARE(isa) \
    namespace isa {                 \
    extern const Kernels table;     \
    }
#if defined(SESSION_SERVER_X86)
SESSION_SERVER_DECLARE(avx512_bf16)
SESSION_SERVER_DECLARE(avx512)
SESSION_SERVER_DECLARE(avx2)
#endif
SESSION_SERVER_DECLARE(portable)

namespace {

struct Choice {
    const Kernels* table;
    bool (*runs)();
};

// The best first.
const Choice kChoices[] = {
#if defined(SESSION_SERVER_X86)
    {&avx512_bf16::table,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
     }},
    {&avx512::table,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    {&avx2::table,
     [] {
         return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
     }},
#endif
    {&portable::table, [] { return true; }},
};

}  // namespace

const Kernels* kernels_named(const char* name) {
    for (const Choice& choice : kChoices) {
        if (std::strcmp(choice.table->name, name) == 0 && choice.runs()) return choice.table;
    }
    return nullptr;
}

namespace {

const Kernels* best() {
    for (const Choice& choice : kChoices) {
        if (choice.runs()) return choice.table;
    }
    return &portable::table;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* table = chosen.load(std::memory_order_acquire);
    if (table == nullptr) chosen.store(table = best(), std::memory_order_release);
    return *table;
}

void use(const Kernels& table) { chosen.store(&table, std::memory_order_release); }

}  // namespace session_server
