// How often the emulated runtime and driver were called, by the name of the function.
#pragma once

namespace emulated {

int num_calls(const char *name = nullptr);  // nullptr: all of them
void forget_calls();
void print_calls();

// Whether anything was asked of the device that made it a context.
bool is_device_awake(int index);

}  // namespace emulated
