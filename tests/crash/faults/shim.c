/* Makes chosen system calls of a process fail, by LD_PRELOAD.

A block of shared memory (the file named by PENSTOCK_FAULTS) holds rules: which call, on which component of the store
under `root`, after how many of them, with which error, how often. Every fault is written into the block's log before it
happens, so that a process which kills itself here is counted too.

What was written and not synced is remembered with the bytes that were there before: a failed sync can lose it, as a
kernel that drops dirty pages does, and a kill can be a loss of power. Sizes and names are not taken back. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* -- the block; shim.py has the same */

enum { FSYNC, FDATASYNC, PWRITE, FTRUNCATE, FALLOCATE, RENAME, UNLINK, CREATE, OPEN, MKDIR, CALLS };
enum { JOURNAL, SSTABLE, QUEUE, QMFT, MANIFEST, SPILL, STAGED, FOLDER, STORE, COMPONENTS };
enum { FAIL, FAIL_HALF, FAIL_LOST, SHORT, KILL, KILL_HALF, KILL_LOST };
enum { RULES = 16, LOG = 512, STAGED_NAMES = 64, PATH_BYTES = 256, TOLD_BYTES = 104, NAME_BYTES = 48 };

struct rule {
  int32_t call, component, mode, error;
  int64_t countdown; /* of matching calls; the one that makes it 0 fails */
  int64_t times;     /* so many fail from then on */
};

struct fault {
  int32_t call, component, mode, error, process, written; /* written: 1 when the other fields are */
  char path[TOLD_BYTES];
};

struct block {
  int32_t enabled, faults;
  int64_t seen[CALLS][COMPONENTS];
  struct rule rules[RULES];
  struct fault log[LOG];
  char root[PATH_BYTES];
  char staged[STAGED_NAMES][NAME_BYTES]; /* files that look like sstables, and were staged; without their suffix */
};

static struct block *block;

__attribute__((constructor)) static void attach(void) {
  const char *path = getenv("PENSTOCK_FAULTS");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *memory = mmap(NULL, sizeof(struct block), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory != MAP_FAILED) block = memory;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* -- which component a path belongs to */

static int is_staged(const char *name) {
  for (int i = 0; i < STAGED_NAMES && block->staged[i][0]; i++)
    if (!strncmp(name, block->staged[i], strlen(block->staged[i]))) return 1;
  return 0;
}

static int in_tables(const char *name) {
  const char *shard = strchr(name, '/');
  shard = shard ? strchr(shard + 1, '/') : NULL;
  const char *rest = shard ? strchr(shard + 1, '/') : NULL;
  const char *spill = shard ? strstr(shard, "-log") : NULL;
  if (spill && (!rest || spill < rest)) return SPILL;
  if (!rest) return FOLDER; /* tables, tables/3, tables/3/0 */
  if (!strncmp(rest, "/manifest", 9)) return QMFT;
  if (strstr(rest, ".sst") || strstr(rest, ".idx")) return is_staged(name) ? STAGED : SSTABLE;
  return QUEUE; /* data files, and the folders of their days */
}

static int component_of(const char *path) { /* -1: not of the store */
  size_t length = strlen(block->root);
  if (!length || strncmp(path, block->root, length) || (path[length] && path[length] != '/')) return -1;
  const char *name = path[length] ? path + length + 1 : "";
  if (!strncmp(name, "journal", 7)) return JOURNAL;
  if (!strncmp(name, "manifest", 8)) return MANIFEST;
  if (!strncmp(name, "tables", 6)) return in_tables(name);
  return STORE;
}

static int path_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_BYTES - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return 1;
}

/* -- whether a call fails */

static const struct rule none = {-1, -1, -1, 0, 0, 0};

static void tell(const struct rule *rule, const char *path) {
  int place = __sync_fetch_and_add(&block->faults, 1);
  if (place >= LOG) return;
  struct fault *fault = &block->log[place];
  fault->call = rule->call, fault->component = rule->component, fault->mode = rule->mode, fault->error = rule->error;
  fault->process = getpid();
  snprintf(fault->path, TOLD_BYTES, "%s", path + strlen(block->root));
  __sync_synchronize();
  fault->written = 1;
}

static const struct rule *judge(int call, const char *path) {
  int component = component_of(path);
  if (component < 0) return &none;
  __sync_fetch_and_add(&block->seen[call][component], 1);
  for (int i = 0; block->enabled && i < RULES; i++) {
    struct rule *rule = &block->rules[i];
    if (rule->times <= 0 || rule->call != call || rule->component != component) continue;
    if (__sync_sub_and_fetch(&rule->countdown, 1) > 0) continue;
    if (__sync_fetch_and_sub(&rule->times, 1) <= 0) continue;
    tell(rule, path);
    return rule;
  }
  return &none;
}

static const struct rule *judge_fd(int call, int fd) {
  char path[PATH_BYTES];
  return block && path_of(fd, path) ? judge(call, path) : &none;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* -- what is written and not synced */

struct unsynced {
  struct unsynced *next; /* the older one */
  dev_t device;
  ino_t inode;
  uint64_t number;
  off_t offset;
  size_t size;
  char path[PATH_BYTES];
  char before[];
};

static struct unsynced *newest;
static uint64_t last_number;
static size_t remembered_bytes;
static pthread_mutex_t remembering = PTHREAD_MUTEX_INITIALIZER;
enum { REMEMBERED_BYTES_MAX = 256 << 20 };

static ssize_t real_pwrite(int fd, const void *data, size_t size, off_t offset) {
  REAL(pwrite);
  return real(fd, data, size, offset);
}

static int real_open(const char *path, int flags) {
  REAL(open);
  return real(path, flags);
}

static void remember(int fd, size_t size, off_t offset) { /* before the write */
  char path[PATH_BYTES];
  struct stat status;
  if (!block || !path_of(fd, path) || component_of(path) < 0 || fstat(fd, &status)) return;
  struct unsynced *write = calloc(1, sizeof *write + size);
  if (!write || pread(fd, write->before, size, offset) < 0) { /* opened to write only: LMDB's, which is synchronous */
    free(write);
    return;
  }
  write->device = status.st_dev, write->inode = status.st_ino, write->offset = offset, write->size = size;
  strcpy(write->path, path);
  pthread_mutex_lock(&remembering);
  if (remembered_bytes + size > REMEMBERED_BYTES_MAX) {
    free(write);
  } else {
    remembered_bytes += size;
    write->number = ++last_number;
    write->next = newest, newest = write;
  }
  pthread_mutex_unlock(&remembering);
}

static uint64_t sync_begins(void) {
  pthread_mutex_lock(&remembering);
  uint64_t number = last_number;
  pthread_mutex_unlock(&remembering);
  return number;
}

static void put_back(const struct unsynced *write) {
  int fd = real_open(write->path, O_RDWR | O_CLOEXEC);
  struct stat status;
  if (fd < 0) return;
  if (!fstat(fd, &status) && status.st_dev == write->device && status.st_ino == write->inode)
    (void)!real_pwrite(fd, write->before, write->size, write->offset);
  close(fd);
}

/* Forget the writes of a file up to a number; with `lost`, take them back. */
static void end_sync(int fd, uint64_t until, int lost) {
  struct stat status;
  if (!block || fstat(fd, &status)) return;
  pthread_mutex_lock(&remembering);
  for (struct unsynced **place = &newest; *place;) {
    struct unsynced *write = *place;
    if (write->number <= until && write->device == status.st_dev && write->inode == status.st_ino) {
      if (lost) put_back(write); /* the newest first */
      *place = write->next;
      remembered_bytes -= write->size;
      free(write);
    } else {
      place = &write->next;
    }
  }
  pthread_mutex_unlock(&remembering);
}

static void lose_power(int salt) { /* salt 0: everything goes; otherwise about half of it */
  pthread_mutex_lock(&remembering); /* for good: nobody else syncs any more */
  for (struct unsynced *write = newest; write; write = write->next)
    if (!salt || (((write->number ^ (uint64_t)salt) * 0x9e3779b97f4a7c15u) >> 63)) put_back(write);
  die();
}

/* What a rule does beside failing; the half of a write is the caller's. */
static void perhaps_die(const struct rule *rule) {
  if (rule->mode == KILL) die();
  if (rule->mode == KILL_LOST) lose_power(rule->error);
}

/* -- the calls */

#define SYNC(name, call) \
  int name(int fd) { \
    REAL(name); \
    const struct rule *rule = judge_fd(call, fd); \
    uint64_t until = sync_begins(); \
    perhaps_die(rule); \
    if (rule->mode == KILL_HALF) real(fd), die(); \
    if (rule->mode < 0) { \
      int result = real(fd); \
      if (!result) end_sync(fd, until, 0); \
      return result; \
    } \
    if (rule->mode == FAIL_LOST) end_sync(fd, until, 1); \
    errno = rule->error; \
    return -1; \
  }

SYNC(fsync, FSYNC)
SYNC(fdatasync, FDATASYNC)

static ssize_t write_at(int fd, const void *data, size_t size, off_t offset) {
  const struct rule *rule = judge_fd(PWRITE, fd);
  perhaps_die(rule);
  remember(fd, size, offset);
  if (rule->mode < 0) return real_pwrite(fd, data, size, offset);
  size_t half = size > 1 ? size / 2 : size;
  if (rule->mode != FAIL && rule->mode != FAIL_LOST) {
    ssize_t written = real_pwrite(fd, data, half, offset);
    if (rule->mode == SHORT) return written;
    if (rule->mode == KILL_HALF) die();
  }
  errno = rule->error;
  return -1;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return write_at(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return write_at(fd, data, size, offset); }

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { /* in one part after the other */
  ssize_t written = 0;
  for (int i = 0; i < count; i++) {
    ssize_t some = write_at(fd, parts[i].iov_base, parts[i].iov_len, offset + written);
    if (some < 0) return written ? written : -1;
    written += some;
    if ((size_t)some < parts[i].iov_len) break;
  }
  return written;
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
  return pwritev(fd, parts, count, offset);
}

ssize_t write(int fd, const void *data, size_t size) { /* copies of the manifest, and LMDB's pages in a row */
  REAL(write);
  const struct rule *rule = fd > 2 ? judge_fd(PWRITE, fd) : &none;
  perhaps_die(rule);
  if (rule->mode < 0) return real(fd, data, size);
  if (rule->mode != FAIL && rule->mode != FAIL_LOST) {
    ssize_t written = real(fd, data, size > 1 ? size / 2 : size);
    if (rule->mode == SHORT) return written;
    if (rule->mode == KILL_HALF) die();
  }
  errno = rule->error;
  return -1;
}

/* A call that is done or not: `judged` says which rule, `done` is the call itself. */
#define WHOLE(judged, done) \
  do { \
    const struct rule *rule = judged; \
    perhaps_die(rule); \
    if (rule->mode == KILL_HALF) { \
      (void)(done); \
      die(); \
    } \
    if (rule->mode < 0) return done; \
    errno = rule->error; \
    return -1; \
  } while (0)

int ftruncate(int fd, off_t size) {
  REAL(ftruncate);
  WHOLE(judge_fd(FTRUNCATE, fd), real(fd, size));
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int posix_fallocate(int fd, off_t offset, off_t size) { /* returns its error */
  REAL(posix_fallocate);
  const struct rule *rule = judge_fd(FALLOCATE, fd);
  perhaps_die(rule);
  if (rule->mode == KILL_HALF) real(fd, offset, size), die();
  return rule->mode < 0 ? real(fd, offset, size) : rule->error;
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }

int rename(const char *source, const char *target) {
  REAL(rename);
  WHOLE(block ? judge(RENAME, target) : &none, real(source, target));
}

int unlink(const char *path) {
  REAL(unlink);
  WHOLE(block ? judge(UNLINK, path) : &none, real(path));
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  WHOLE(block ? judge(MKDIR, path) : &none, real(path, mode));
}

#define OPENING(name) \
  int name(const char *path, int flags, ...) { \
    static int (*real)(const char *, int, ...); \
    if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest); \
    int call = flags & O_CREAT ? CREATE : OPEN; \
    WHOLE(block && *path == '/' && !(flags & O_PATH) ? judge(call, path) : &none, real(path, flags, mode)); \
  }

OPENING(open)
OPENING(open64)
