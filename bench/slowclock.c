/* A clock that goes slower, by a factor that a file has (a double), to be preloaded into a program under valgrind:
   its timers then weigh what they weigh at full speed, not fifty times as much. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CLOCKS 16

static const double *factor;
static int (*machine)(clockid_t, struct timespec *);
static double read_at[CLOCKS], shown[CLOCKS];

__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("SLOW_FACTOR"), O_RDONLY);
  factor = mmap(0, sizeof *factor, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  machine = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  int result = machine(clock, at);
  if (clock < 0 || clock >= CLOCKS || clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID) return result;
  double now = at->tv_sec + at->tv_nsec * 1e-9;
  shown[clock] = read_at[clock] ? shown[clock] + (now - read_at[clock]) / *(volatile const double *)factor : now;
  read_at[clock] = now;
  at->tv_sec = (time_t)shown[clock];
  at->tv_nsec = (long)((shown[clock] - at->tv_sec) * 1e9);
  return result;
}
