// __SANITIZE_ADDRESS__ and __SANITIZE_THREAD__ of g++, with clang too.
#pragma once

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#elif __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
