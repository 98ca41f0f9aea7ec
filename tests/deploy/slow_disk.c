/* Preloaded: syncing a file under $SLOW_FOLDER waits for as long as $SLOW_WHILE exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_where_slow(int file) {
    const char *folder = getenv("SLOW_FOLDER"), *trigger = getenv("SLOW_WHILE");
    char link[64], path[4096];
    if (!folder || !trigger) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder))) return;
    while (!access(trigger, F_OK)) usleep(50000);
}

int fsync(int file) {
    wait_where_slow(file);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int fdatasync(int file) {
    wait_where_slow(file);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
