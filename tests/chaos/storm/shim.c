/* Preloaded into the daemon and its children: a wall clock that can be set, and a slow disk.
 *
 * The test writes a page with two numbers: nanoseconds that the wall clock is ahead, and nanoseconds
 * that each fsync() and fdatasync() takes longer. The monotonic clock does not change, as it does not
 * when the clock of a machine is set. The clock of the machine itself is not touched.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL

struct page {
    volatile int64_t ahead_ns;
    volatile int64_t sync_ns;
};

static const struct page nothing;
static const struct page *page = &nothing;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);

__attribute__((constructor)) static void begin(void)
{
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    const char *path = getenv("CHAOS_PAGE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof(struct page), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED)
        page = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *found)
{
    int result = real_clock_gettime(clock, found);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = found->tv_sec * SECOND_NS + found->tv_nsec + page->ahead_ns;
        found->tv_sec = ns / SECOND_NS;
        found->tv_nsec = ns % SECOND_NS;
    }
    return result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found)
        *found = now.tv_sec;
    return now.tv_sec;
}

static void take_long(void)
{
    int64_t ns = page->sync_ns;
    struct timespec pause = {ns / SECOND_NS, ns % SECOND_NS};
    if (ns > 0)
        nanosleep(&pause, NULL);
}

int fsync(int fd)
{
    take_long();
    return real_fsync(fd);
}

int fdatasync(int fd)
{
    take_long();
    return real_fdatasync(fd);
}
