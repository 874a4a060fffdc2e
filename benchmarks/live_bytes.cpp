// Counts the bytes that PyTorch holds in CPU memory, in a process that starts with this library in LD_PRELOAD.
//
// PyTorch's CPU allocator takes each tensor from posix_memalign with an alignment of 64 bytes (c10/core/impl/alloc_cpu.cpp)
// and returns it to free. So these calls of its library are the tensors, whichever thread makes them. PyTorch's profiler
// misses what other threads free.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <mutex>

extern "C" void __libc_free(void*);

namespace {

constexpr size_t ALIGNMENT = 64;
constexpr size_t SLOTS = 1 << 20;  // tensors alive at once, at most half of it

// An open-addressing table from address to size; address 0 is a free slot, GONE one that a removal left.
struct Slot {
    uintptr_t address;
    size_t size;
};
constexpr uintptr_t GONE = 1;
Slot table[SLOTS];
std::mutex lock;
std::atomic<int64_t> live{0}, peak{0};

size_t first_slot(uintptr_t address) { return (address / ALIGNMENT * 0x9E3779B97F4A7C15ull) >> 44; }

void add(uintptr_t address, size_t size) {
    std::lock_guard<std::mutex> held(lock);
    size_t slot = first_slot(address);
    while (table[slot].address > GONE) slot = (slot + 1) % SLOTS;
    table[slot] = {address, size};
    live += int64_t(size);
    if (live > peak) peak = live.load();
}

void remove(uintptr_t address) {
    std::lock_guard<std::mutex> held(lock);
    for (size_t slot = first_slot(address), seen = 0; table[slot].address && seen < SLOTS; ++seen) {
        if (table[slot].address == address) {
            live -= int64_t(table[slot].size);
            // Without a next entry in the chain, the slot can be free again.
            table[slot].address = table[(slot + 1) % SLOTS].address ? GONE : 0;
            return;
        }
        slot = (slot + 1) % SLOTS;
    }
}

// The addresses of PyTorch's library of allocators; 0 to 0 until it is loaded.
struct Range {
    std::atomic<uintptr_t> begin{0}, end{0};
} allocators;

int find_allocators(dl_phdr_info* library, size_t, void*) {
    if (!std::strstr(library->dlpi_name, "libc10.so")) return 0;
    uintptr_t end = library->dlpi_addr;
    for (int part = 0; part < library->dlpi_phnum; ++part) {
        const auto& header = library->dlpi_phdr[part];
        if (header.p_type == PT_LOAD) end = std::max<uintptr_t>(end, library->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    allocators.begin = library->dlpi_addr;
    allocators.end = end;
    return 1;
}

// Whether this is an address in it; oneDNN's scratchpads, from another library, have the same alignment. dladdr would
// look through all symbols of the caller's library at every call.
bool is_allocator(void* caller) {
    if (!allocators.end) dl_iterate_phdr(find_allocators, nullptr);
    const auto address = reinterpret_cast<uintptr_t>(caller);
    return allocators.begin <= address && address < allocators.end;
}

}  // namespace

extern "C" {

int posix_memalign(void** result, size_t alignment, size_t size) {
    using Function = int (*)(void**, size_t, size_t);
    static const Function original = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
    const int error = original(result, alignment, size);
    if (!error && alignment == ALIGNMENT && is_allocator(__builtin_return_address(0))) add(reinterpret_cast<uintptr_t>(*result), size);
    return error;
}

void free(void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address && address % ALIGNMENT == 0) remove(address);
    __libc_free(pointer);
}

int64_t live_bytes() { return live; }
int64_t peak_bytes() { return peak; }
void reset_peak() { peak = live.load(); }
}
