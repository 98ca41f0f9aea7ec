/* Preloaded: what opens, writes or syncs a file under $SLOW_FOLDER waits while $SLOW_WHILE exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_for_path(const char *path) {
    const char *folder = getenv("SLOW_FOLDER"), *trigger = getenv("SLOW_WHILE");
    if (!folder || !trigger || strncmp(path, folder, strlen(folder))) return;
    while (!access(trigger, F_OK)) usleep(50000);
}

static void wait_for_file(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    wait_for_path(path);
}

#define OPEN(name)                                                                             \
    int name(const char *path, int flags, ...) {                                               \
        va_list rest;                                                                          \
        va_start(rest, flags);                                                                 \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                                          \
        wait_for_path(path);                                                                   \
        return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode);  \
    }

OPEN(open)
OPEN(open64)

ssize_t write(int file, const void *bytes, size_t count) {
    wait_for_file(file);
    return ((ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write"))(file, bytes, count);
}

int fsync(int file) {
    wait_for_file(file);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int fdatasync(int file) {
    wait_for_file(file);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
