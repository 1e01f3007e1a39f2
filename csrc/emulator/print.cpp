// The one function that kernels call: vprintf (CUDA Programming Guide, Formatted Output). Arguments lie one after the
// other in the lane's local memory, each at a multiple of its size; floating-point ones are doubles.
#include <algorithm>

#include "lanes.h"

namespace emu {
namespace {

std::string format(const char* f, const uint8_t* arguments, const uint8_t* end) {
    std::string out;
    auto take = [&](size_t n) {
        uintptr_t at = (uintptr_t(arguments) + n - 1) / n * n;
        arguments = reinterpret_cast<const uint8_t*>(at) + n;
        if (arguments > end) fault("printf reads more arguments than there are");
        return reinterpret_cast<const uint8_t*>(at);
    };
    for (; *f; f++) {
        if (*f != '%') {
            out += *f;
            continue;
        }
        std::string spec = "%";
        while (f[1] && !std::isalpha(static_cast<unsigned char>(f[1])) && f[1] != '%') spec += *++f;
        int longs = 0;
        while (f[1] == 'l' || f[1] == 'h' || f[1] == 'z') longs += *++f != 'h';
        char kind = *++f, text[512];
        if (!kind) break;
        if (kind == '%') {
            out += '%';
        } else if (kind == 's') {
            uint64_t p;
            memcpy(&p, take(8), 8);
            snprintf(text, sizeof text, (spec + 's').c_str(), reinterpret_cast<const char*>(p));
            out += text;
        } else if (strchr("eEfFgGaA", kind)) {
            double v;
            memcpy(&v, take(8), 8);
            snprintf(text, sizeof text, (spec + kind).c_str(), v);
            out += text;
        } else if (longs || kind == 'p') {
            long long v;
            memcpy(&v, take(8), 8);
            snprintf(text, sizeof text, (spec + (kind == 'p' ? "#llx" : "ll" + std::string(1, kind))).c_str(), v);
            out += text;
        } else {
            int v;
            memcpy(&v, take(4), 4);
            snprintf(text, sizeof text, (spec + kind).c_str(), v);
            out += text;
        }
    }
    return out;
}

Next vprintf_(Warp& w, const Op& o, uint32_t m) {  // result (may be absent), format, arguments
    uint32_t size = w.launch->program->local_bytes;
    EACH_LANE(l, m) {
        const char* f = reinterpret_cast<const char*>(w.src<uint64_t>(o.x[1])[l]);
        uint64_t a = w.src<uint64_t>(o.x[2])[l] & 0xffffffffu;
        const uint8_t* local = w.local.data() + size_t(l) * size;
        if (a > size) fault("printf: local address 0x%lx of lane %u", a, l);
        w.launch->printed += format(f, local + a, local + size);
        if (o.x[0] != NONE) w.dst<uint32_t>(o.x[0])[l] = 1;
    }
    return Next::advance;
}

const HandlerName table[] = {{"vprintf", vprintf_}};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
