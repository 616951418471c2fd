/* A library that is preloaded into a program: it counts the calls that use files below one folder,
 * and at the n-th it kills the process, tears the write, or fails the call.
 *
 * Calls that change: open for writing, write, fsync, truncate, rename, link, unlink, mkdir, rmdir.
 * Calls that look: open for reading (a folder too), read, lock.  The count is shared by a process
 * and its children.  Each call is also written to a journal, with what it wrote, from which
 * `disk.py` rebuilds the folder after a loss of power.  Nothing happens before `filecalls_arm` is
 * called; the program's own code does not know of any of this.  A failure meets calls of some kinds:
 * a full disk can be read.
 *
 * Journal: records of a header (struct record, little endian) and three byte strings: the path
 * relative to the folder, the second path (rename, link), and the data.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* NOTHING: a call that the system refused, which has a number too. */
enum { NOTHING, OPEN, WRITE, SYNC, TRUNCATE, RENAME, LINK, UNLINK, MKDIR, RMDIR, SYMLINK,
       LOOK, READ, LOCK };
enum { NONE, KILL, TEAR, FAIL };

struct record {
    uint32_t kind, flags;
    int64_t offset;
    uint32_t path, other;
    uint64_t data;
};

static struct {
    volatile int armed;
    char under[PATH_MAX];
    size_t length;
    int action, code, sticky, kinds, journal;
    long at;
    volatile long *count; /* shared with children */
} plan;

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

static ssize_t raw_write(int fd, const void *data, size_t size) {
    const char *at = data;
    size_t left = size;
    while (left) {
        ssize_t n = syscall(SYS_write, fd, at, left);
        if (n < 0) {
            if (errno == EINTR) continue;
            return -1;
        }
        at += n, left -= (size_t)n;
    }
    return (ssize_t)size;
}

/* Begin to count below a folder. at = 0 counts only. journal may be NULL.  kinds: the bits (1 << kind)
 * of calls that fail. */
int filecalls_arm(const char *under, long at, int action, int code, int sticky, int kinds,
                  const char *journal) {
    if (!realpath(under, plan.under)) return -1;
    plan.length = strlen(plan.under);
    plan.count = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (plan.count == MAP_FAILED) return -1;
    *plan.count = 0;
    plan.at = at, plan.action = action, plan.code = code, plan.sticky = sticky;
    plan.kinds = kinds;
    plan.journal = journal ? (int)syscall(SYS_openat, AT_FDCWD, journal,
                                          O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)
                           : -1;
    plan.armed = 1;
    return 0;
}

long filecalls_count(void) { return plan.count ? *plan.count : 0; }

/* The absolute path of a name, links of its folder resolved; 0 if it is not below the folder. */
static int below(int folder, const char *name, char *out) {
    char full[PATH_MAX], parent[PATH_MAX], real[PATH_MAX];
    if (!plan.armed || !name) return 0;
    if (name[0] == '/') {
        if (snprintf(full, sizeof full, "%s", name) >= (int)sizeof full) return 0;
    } else {
        char base[PATH_MAX];
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) < 0) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t n = readlink(link, base, sizeof base - 1);
            if (n < 0) return 0;
            base[n] = 0;
        }
        if (snprintf(full, sizeof full, "%s/%s", base, name) >= (int)sizeof full) return 0;
    }
    snprintf(parent, sizeof parent, "%s", full);
    char *slash = strrchr(parent, '/');
    if (!slash) return 0;
    char *last = slash + 1;
    *slash = 0;
    if (!realpath(slash == parent ? "/" : parent, real)) return 0;
    if (snprintf(out, PATH_MAX, "%s/%s", real, last) >= PATH_MAX) return 0;
    return strncmp(out, plan.under, plan.length) == 0 && (out[plan.length] == '/' || !out[plan.length]);
}

static int open_below(int fd, char *out) {
    char link[64];
    if (!plan.armed || fd == plan.journal) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n <= 0) return 0;
    out[n] = 0;
    return strncmp(out, plan.under, plan.length) == 0 && (out[plan.length] == '/' || !out[plan.length]);
}

static void note(uint32_t kind, uint32_t flags, int64_t offset, const char *path, const char *other,
                 const void *data, size_t size) {
    if (plan.journal < 0) return;
    path += plan.length + (path[plan.length] == '/');
    if (other) other += plan.length + (other[plan.length] == '/');
    struct record head = {kind, flags, offset, (uint32_t)strlen(path),
                          other ? (uint32_t)strlen(other) : 0, size};
    raw_write(plan.journal, &head, sizeof head);
    raw_write(plan.journal, path, head.path);
    if (other) raw_write(plan.journal, other, head.other);
    if (size) raw_write(plan.journal, data, size);
}

/* What to do at this call: NONE, TEAR, or FAIL (errno is set). KILL does not return. */
static int turn(int kind) {
    long n = __sync_add_and_fetch(plan.count, 1);
    if (!plan.at || plan.action == NONE || n < plan.at || (n > plan.at && !plan.sticky)) return NONE;
    if (plan.action == KILL) kill(getpid(), SIGKILL);
    if (plan.action == TEAR) return n == plan.at ? TEAR : NONE;
    if (!(plan.kinds & 1 << kind)) return NONE;
    errno = plan.code;
    return FAIL;
}

#define ENTER pthread_mutex_lock(&order)
#define LEAVE do { int kept = errno; pthread_mutex_unlock(&order); errno = kept; } while (0)

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
    if (!below(folder, name, path))
        return (int)syscall(SYS_openat, folder, name, flags, mode);
    ENTER;
    int fd = -1;
    if (turn(writes ? OPEN : LOOK) != FAIL) {
        struct stat before;
        int created = (flags & O_CREAT) && lstat(path, &before) != 0;
        fd = (int)syscall(SYS_openat, folder, name, flags, mode);
        note(!writes ? LOOK : fd < 0 ? NOTHING : OPEN, (created ? 1u : 0u) | ((flags & O_TRUNC) ? 2u : 0u),
             mode, path, NULL, NULL, 0);
    }
    LEAVE;
    return fd;
}

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | __O_TMPFILE) ? (mode_t)va_arg(rest, unsigned) : 0;
}

#define OPENER(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        return opened(AT_FDCWD, path, flags, mode); \
    }
OPENER(open)
OPENER(open64)
#define OPENER_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        return opened(folder, path, flags, mode); \
    }
OPENER_AT(openat)
OPENER_AT(openat64)
int creat(const char *path, mode_t mode) {
    return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

#define OPENER_2(name) \
    int name(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
OPENER_2(__open_2)
OPENER_2(__open64_2)
#define OPENER_AT_2(name) \
    int name(int folder, const char *path, int flags) { return opened(folder, path, flags, 0); }
OPENER_AT_2(__openat_2)
OPENER_AT_2(__openat64_2)

DIR *opendir(const char *name) {
    int fd = opened(AT_FDCWD, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    return fd < 0 ? NULL : fdopendir(fd);
}

/* Whether a call that looks may happen; noted either way, so that the numbers stay. */
static int looks(int fd, int kind) {
    char path[PATH_MAX];
    if (!open_below(fd, path)) return 1;
    ENTER;
    int may = turn(kind) != FAIL;
    if (may) note((uint32_t)kind, 0, 0, path, NULL, NULL, 0);
    LEAVE;
    return may;
}
ssize_t read(int fd, void *data, size_t size) {
    return looks(fd, READ) ? syscall(SYS_read, fd, data, size) : -1;
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    return looks(fd, READ) ? syscall(SYS_pread64, fd, data, size, at) : -1;
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { return pread(fd, data, size, at); }
ssize_t __read_chk(int fd, void *data, size_t size, size_t room) {
    return size > room ? (errno = EFAULT, -1) : read(fd, data, size);
}
ssize_t __pread_chk(int fd, void *data, size_t size, off_t at, size_t room) {
    return size > room ? (errno = EFAULT, -1) : pread(fd, data, size, at);
}
ssize_t __pread64_chk(int fd, void *data, size_t size, off64_t at, size_t room) {
    return __pread_chk(fd, data, size, at, room);
}
ssize_t readv(int fd, const struct iovec *parts, int n) {
    return looks(fd, READ) ? syscall(SYS_readv, fd, parts, n) : -1;
}
ssize_t preadv(int fd, const struct iovec *parts, int n, off_t at) {
    return looks(fd, READ) ? syscall(SYS_preadv, fd, parts, n, (long)at, (long)0) : -1;
}
ssize_t preadv64(int fd, const struct iovec *parts, int n, off64_t at) { return preadv(fd, parts, n, at); }

int flock(int fd, int how) {
    if (!(how & LOCK_UN) && !looks(fd, LOCK)) return -1;
    return (int)syscall(SYS_flock, fd, how);
}
int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
    if (locks && ((struct flock *)argument)->l_type != F_UNLCK && !looks(fd, LOCK)) return -1;
    return (int)syscall(SYS_fcntl, fd, command, argument);
}
int fcntl64(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return fcntl(fd, command, argument);
}

static ssize_t written(int fd, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    ssize_t done = -1;
    if (!open_below(fd, path))
        return offset < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, offset);
    ENTER;
    int what = turn(WRITE);
    if (what != FAIL) {
        off_t at = offset;
        if (at < 0) {
            at = fcntl(fd, F_GETFL) & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
        }
        size_t part = what == TEAR ? size / 2 : size;
        done = offset < 0 ? syscall(SYS_write, fd, data, part) : syscall(SYS_pwrite64, fd, data, part, offset);
        note(done > 0 ? WRITE : NOTHING, 0, at, path, NULL, data, done > 0 ? (size_t)done : 0);
        if (what == TEAR) kill(getpid(), SIGKILL);
    }
    LEAVE;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return written(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return written(fd, data, size, at); }

static ssize_t gathered(int fd, const struct iovec *parts, int n, off_t offset) {
    char path[PATH_MAX];
    if (!open_below(fd, path)) {
        if (offset < 0) return syscall(SYS_writev, fd, parts, n);
        return syscall(SYS_pwritev, fd, parts, n, (long)offset, (long)0);
    }
    size_t size = 0;
    for (int i = 0; i < n; i++) size += parts[i].iov_len;
    char *all = malloc(size ? size : 1), *at = all;
    for (int i = 0; i < n; i++) {
        memcpy(at, parts[i].iov_base, parts[i].iov_len);
        at += parts[i].iov_len;
    }
    ssize_t done = written(fd, all, size, offset);
    free(all);
    return done;
}
ssize_t writev(int fd, const struct iovec *parts, int n) { return gathered(fd, parts, n, -1); }
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) { return gathered(fd, parts, n, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t at) { return gathered(fd, parts, n, at); }

/* Fast copies go through write. */
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    char path[PATH_MAX];
    if (open_below(to, path)) { errno = ENOSYS; return -1; }
    return syscall(SYS_sendfile, to, from, at, size);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { return sendfile(to, from, at, size); }
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (open_below(to, path)) { errno = ENOSYS; return -1; }
    return syscall(SYS_copy_file_range, from, a, to, b, size, flags);
}

static int synced(int fd, long number) {
    char path[PATH_MAX];
    if (!open_below(fd, path)) return (int)syscall(number, fd);
    ENTER;
    int done = -1;
    if (turn(SYNC) != FAIL) {
        struct stat info;
        done = 0; /* the disk is that of the recorder */
        note(SYNC, fstat(fd, &info) == 0 && S_ISDIR(info.st_mode) ? 1 : 0, 0, path, NULL, NULL, 0);
    }
    LEAVE;
    return done;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int shortened(int fd, off_t size) {
    char path[PATH_MAX];
    if (!open_below(fd, path)) return (int)syscall(SYS_ftruncate, fd, size);
    ENTER;
    int done = -1;
    if (turn(TRUNCATE) != FAIL) {
        done = (int)syscall(SYS_ftruncate, fd, size);
        note(done == 0 ? TRUNCATE : NOTHING, 0, size, path, NULL, NULL, 0);
    }
    LEAVE;
    return done;
}
int ftruncate(int fd, off_t size) { return shortened(fd, size); }
int ftruncate64(int fd, off64_t size) { return shortened(fd, size); }
static int cut(const char *name, off_t size) {
    char path[PATH_MAX];
    if (!below(AT_FDCWD, name, path)) return (int)syscall(SYS_truncate, name, size);
    ENTER;
    int done = -1;
    if (turn(TRUNCATE) != FAIL) {
        done = (int)syscall(SYS_truncate, name, size);
        note(done == 0 ? TRUNCATE : NOTHING, 0, size, path, NULL, NULL, 0);
    }
    LEAVE;
    return done;
}
int truncate(const char *name, off_t size) { return cut(name, size); }
int truncate64(const char *name, off64_t size) { return cut(name, size); }
static int allocated(int fd, off_t offset, off_t size) {
    (void)offset, (void)size;
    char path[PATH_MAX];
    return open_below(fd, path) ? EOPNOTSUPP : -1;
}
int posix_fallocate(int fd, off_t offset, off_t size) {
    int no = allocated(fd, offset, size);
    if (no > 0) return no;
    return syscall(SYS_fallocate, fd, 0, offset, size) ? errno : 0;
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }
int fallocate(int fd, int mode, off_t offset, off_t size) {
    if (allocated(fd, offset, size) > 0) { errno = EOPNOTSUPP; return -1; }
    return (int)syscall(SYS_fallocate, fd, mode, offset, size);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }

static int moved(int from, const char *old, int to, const char *fresh, unsigned flags) {
    char path[PATH_MAX], other[PATH_MAX];
    if (!below(from, old, path) || !below(to, fresh, other))
        return (int)syscall(SYS_renameat2, from, old, to, fresh, flags);
    ENTER;
    int done = -1;
    if (turn(RENAME) != FAIL) {
        done = (int)syscall(SYS_renameat2, from, old, to, fresh, flags);
        note(done == 0 ? RENAME : NOTHING, flags, 0, path, other, NULL, 0);
    }
    LEAVE;
    return done;
}
int rename(const char *old, const char *fresh) { return moved(AT_FDCWD, old, AT_FDCWD, fresh, 0); }
int renameat(int from, const char *old, int to, const char *fresh) { return moved(from, old, to, fresh, 0); }
int renameat2(int from, const char *old, int to, const char *fresh, unsigned flags) {
    return moved(from, old, to, fresh, flags);
}

static int linked(int from, const char *old, int to, const char *fresh, int flags) {
    char path[PATH_MAX], other[PATH_MAX];
    if (!below(from, old, path) || !below(to, fresh, other))
        return (int)syscall(SYS_linkat, from, old, to, fresh, flags);
    ENTER;
    int done = -1;
    if (turn(LINK) != FAIL) {
        done = (int)syscall(SYS_linkat, from, old, to, fresh, flags);
        note(done == 0 ? LINK : NOTHING, 0, 0, path, other, NULL, 0);
    }
    LEAVE;
    return done;
}
int link(const char *old, const char *fresh) { return linked(AT_FDCWD, old, AT_FDCWD, fresh, 0); }
int linkat(int from, const char *old, int to, const char *fresh, int flags) {
    return linked(from, old, to, fresh, flags);
}
int symlinkat(const char *target, int folder, const char *name) {
    char path[PATH_MAX];
    if (!below(folder, name, path)) return (int)syscall(SYS_symlinkat, target, folder, name);
    ENTER;
    int done = -1;
    if (turn(SYMLINK) != FAIL) {
        done = (int)syscall(SYS_symlinkat, target, folder, name);
        note(done == 0 ? SYMLINK : NOTHING, 0, 0, path, NULL, target, strlen(target));
    }
    LEAVE;
    return done;
}
int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }

static int removed(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!below(folder, name, path)) return (int)syscall(SYS_unlinkat, folder, name, flags);
    ENTER;
    int done = -1;
    if (turn(flags & AT_REMOVEDIR ? RMDIR : UNLINK) != FAIL) {
        done = (int)syscall(SYS_unlinkat, folder, name, flags);
        note(done < 0 ? NOTHING : flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, 0, path, NULL, NULL, 0);
    }
    LEAVE;
    return done;
}
int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    int done = unlink(name);
    return done < 0 && (errno == EISDIR || errno == EPERM) ? rmdir(name) : done;
}

static int made(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!below(folder, name, path)) return (int)syscall(SYS_mkdirat, folder, name, mode);
    ENTER;
    int done = -1;
    if (turn(MKDIR) != FAIL) {
        done = (int)syscall(SYS_mkdirat, folder, name, mode);
        note(done == 0 ? MKDIR : NOTHING, 0, mode, path, NULL, NULL, 0);
    }
    LEAVE;
    return done;
}
int mkdir(const char *name, mode_t mode) { return made(AT_FDCWD, name, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return made(folder, name, mode); }
