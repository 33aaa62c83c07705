/* A clock that jumps: every look at the time of day is a day before or behind the one before. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

static int looks;

static long shift(void) {
    const char *mark = getenv("JUMPING_CLOCK_MARK");
    if (mark && !looks) close(open(mark, O_CREAT | O_WRONLY, 0600));
    return 86400L * (looks++ % 2 ? -1 : 1);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (!code && clock == CLOCK_REALTIME) now->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(now, zone);
    if (!code) now->tv_sec += shift();
    return code;
}
