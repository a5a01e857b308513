/* A disk that breaks under the store: a library put before libc in the daemon's process.
 *
 * Files in the directory $BROKEN_DISK say what is broken, so that a test can break it and mend it:
 *     nosync-once   the next sync of a store file fails; from then on the disk is read-only
 *     nosync        every sync of a store file fails
 *     readonly      every write to a store file fails with EROFS
 *     slow-reads    each transaction that reads takes 0.2 s longer, in threads beside the first
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_store(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, "/store.db") != 0;
}

static int is_on(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("BROKEN_DISK"), name);
    return access(path, F_OK) == 0;
}

static int sync_fails(int fd) {
    char once[4096], readonly[4096];
    if (!is_store(fd)) return 0;
    if (is_on("nosync")) return 1;
    snprintf(once, sizeof once, "%s/nosync-once", getenv("BROKEN_DISK"));
    snprintf(readonly, sizeof readonly, "%s/readonly", getenv("BROKEN_DISK"));
    return rename(once, readonly) == 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(number) do { errno = number; return -1; } while (0)

int fdatasync(int fd) { if (sync_fails(fd)) FAIL(EIO); return REAL(fdatasync)(fd); }
int fsync(int fd) { if (sync_fails(fd)) FAIL(EIO); return REAL(fsync)(fd); }
/* A transaction that reads begins with a shared lock on the index. */
int fcntl64(int fd, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    if (command == F_SETLK && ((struct flock *)argument)->l_type == F_RDLCK &&
        gettid() != getpid() && is_on("slow-reads") && is_store(fd))
        usleep(200000);
    return REAL(fcntl64)(fd, command, argument);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    if (is_on("readonly") && is_store(fd)) FAIL(EROFS);
    return REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    if (is_on("readonly") && is_store(fd)) FAIL(EROFS);
    return REAL(pwrite64)(fd, data, size, at);
}
ssize_t write(int fd, const void *data, size_t size) {
    if (is_on("readonly") && is_store(fd)) FAIL(EROFS);
    return REAL(write)(fd, data, size);
}
int ftruncate(int fd, off_t size) {
    if (is_on("readonly") && is_store(fd)) FAIL(EROFS);
    return REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    if (is_on("readonly") && is_store(fd)) FAIL(EROFS);
    return REAL(ftruncate64)(fd, size);
}
