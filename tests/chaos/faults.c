/* Every call that persists something below one directory, recorded and stopped on demand.

   Preloaded into a process and all its children (LD_PRELOAD), it stands between them and the C
   library. What it does is read from a block of memory that all of them and the test share: a
   file named by FAULTS_CONTROL, laid out as `struct control`, written by tests/chaos/faults.py,
   also while they run. Operations are counted over all processes.

   Not seen, because they pass by these calls: C's own buffered files (fwrite) and memory maps.
   That nothing was missed is shown by rebuilding a directory from its record, byte for byte.
   What must not live here: opinions about which fault is survived. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { CREATE, WRITE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, OPEN, ACCESS };

struct control {
    int64_t counter;              /* operations so far, of those that match */
    int64_t kill_at;              /* SIGKILL before the operation of this index; -1 never */
    int64_t torn;                 /* but a write first gets half of its bytes out */
    int64_t fail_from, fail_until;/* operations from .. up to .. fail; -1 none */
    int64_t error;                /* with this errno */
    int64_t kinds;                /* if their kind is in this set (bits) */
    int64_t room;                 /* bytes that files may still grow by; -1 no limit */
    int64_t clock_ns;             /* added to the wall clock that Python sees */
    int64_t record;               /* 0 nothing, 1 operations, 2 with what was written */
    char root[512], match[256], log[512];
};

struct header { int64_t index, offset, length; int32_t kind, pid, error, n_path, n_other, n_data; };

struct call { int64_t index; int kind; char path[PATH_MAX], other[PATH_MAX]; };

enum { NOT_OURS = -1, REFUSED = -2, MAX_FDS = 65536 };

static struct control *control;
static char below_root[MAX_FDS];  /* descriptors opened below the root; others cost one look */
static char *python_from, *python_to;  /* where the interpreter's code lies */

#define REAL(name, ...) (real_##name ? 0 : (void *)(real_##name = dlsym(RTLD_NEXT, #name)), \
                         real_##name(__VA_ARGS__))
#define DECLARE(type, name, ...) static type (*real_##name)(__VA_ARGS__)

DECLARE(int, open, const char *, int, ...);
DECLARE(int, open64, const char *, int, ...);
DECLARE(int, openat, int, const char *, int, ...);
DECLARE(int, openat64, int, const char *, int, ...);
DECLARE(ssize_t, write, int, const void *, size_t);
DECLARE(ssize_t, pwrite, int, const void *, size_t, off_t);
DECLARE(ssize_t, pwrite64, int, const void *, size_t, off64_t);
DECLARE(ssize_t, writev, int, const struct iovec *, int);
DECLARE(int, fsync, int);
DECLARE(int, fdatasync, int);
DECLARE(int, rename, const char *, const char *);
DECLARE(int, renameat, int, const char *, int, const char *);
DECLARE(int, renameat2, int, const char *, int, const char *, unsigned);
DECLARE(int, unlink, const char *);
DECLARE(int, unlinkat, int, const char *, int);
DECLARE(int, rmdir, const char *);
DECLARE(int, mkdir, const char *, mode_t);
DECLARE(int, mkdirat, int, const char *, mode_t);
DECLARE(int, ftruncate, int, off_t);
DECLARE(int, ftruncate64, int, off64_t);
DECLARE(int, access, const char *, int);
DECLARE(int, faccessat, int, const char *, int, int);
DECLARE(ssize_t, sendfile, int, int, off_t *, size_t);
DECLARE(ssize_t, sendfile64, int, int, off64_t *, size_t);
DECLARE(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
DECLARE(int, clock_gettime, clockid_t, struct timespec *);
DECLARE(int, gettimeofday, struct timeval *, void *);
DECLARE(time_t, time, time_t *);

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FAULTS_CONTROL");
    int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (found != MAP_FAILED) control = found;
}

/* -- which calls concern us -------------------------------------------------------------------- */

static int descriptor_path(int fd, char *out) {
    char link[64] = "/proc/self/fd/", digits[16];
    int n = 0, at = 14;
    do digits[n++] = '0' + fd % 10; while (fd /= 10);
    while (n) link[at++] = digits[--n];
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length <= 0) return 0;
    out[length] = 0;
    return 1;
}

/* Absolute path without ".", ".." and doubled slashes; symbolic links are left as they are. */
static int absolute_path(int dirfd, const char *path, char *out) {
    char whole[2 * PATH_MAX];
    if (!path) return 0;
    if (path[0] == '/') whole[0] = 0;
    else if (dirfd == AT_FDCWD ? !getcwd(whole, PATH_MAX) : !descriptor_path(dirfd, whole)) return 0;
    if (strlen(whole) + strlen(path) + 2 > PATH_MAX) return 0;
    strcat(strcat(whole, "/"), path);
    size_t end = 0;
    for (char *rest, *part = strtok_r(whole, "/", &rest); part; part = strtok_r(NULL, "/", &rest)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) { while (end && out[--end] != '/'); continue; }
        out[end++] = '/';
        strcpy(out + end, part);
        end += strlen(part);
    }
    out[end] = 0;
    return 1;
}

/* The path relative to the root, NULL when it is not below it. */
static const char *relative(const char *path) {
    size_t length = strlen(control->root);
    if (strncmp(path, control->root, length)) return NULL;
    return path[length] == '/' ? path + length + 1 : path[length] ? NULL : path + length;
}

/* Count the call, and let it die or fail if that is its fate. */
static int begin(struct call *call, int kind) {
    const char *path = relative(call->path), *other = *call->other ? relative(call->other) : NULL;
    if ((!path && !other) || !*control->root) return NOT_OURS;
    size_t length = strlen(call->path);
    if (length > 10 && !strcmp(call->path + length - 10, " (deleted)")) return NOT_OURS;
    if (*control->match && (!path || fnmatch(control->match, path, 0)) &&
        (!other || fnmatch(control->match, other, 0))) return NOT_OURS;
    call->kind = kind;
    call->index = kind >= OPEN ? __atomic_load_n(&control->counter, __ATOMIC_SEQ_CST)
                               : __atomic_fetch_add(&control->counter, 1, __ATOMIC_SEQ_CST);
    if (kind < OPEN && call->index == control->kill_at && !(control->torn && kind == WRITE))
        kill(getpid(), SIGKILL);
    if (control->fail_from >= 0 && call->index >= control->fail_from &&
        call->index < control->fail_until && control->kinds >> kind & 1) {
        errno = control->error;
        return REFUSED;
    }
    return 0;
}

static int begin_path(struct call *call, int kind, int dirfd, const char *path) {
    *call->path = *call->other = 0;
    if (!control || !absolute_path(dirfd, path, call->path)) return NOT_OURS;
    return begin(call, kind);
}

static int begin_descriptor(struct call *call, int kind, int fd) {
    if (!control || fd < 0 || fd >= MAX_FDS || !below_root[fd]) return NOT_OURS;
    int before = errno;
    if (!descriptor_path(fd, call->path) || !relative(call->path)) {
        below_root[fd] = 0;  /* closed since, and used for something else */
        errno = before;
        return NOT_OURS;
    }
    *call->other = 0;
    return begin(call, kind);
}

static void end(struct call *call, int64_t result, int64_t offset, int64_t length,
                const struct iovec *data, int num_data) {
    if (!control->record) return;
    int before = errno, log;
    const char *path = relative(call->path), *other = *call->other ? relative(call->other) : NULL;
    struct header header = {call->index, offset, length, call->kind, getpid(),
                            result < 0 ? before : 0, path ? strlen(path) : 0,
                            other ? strlen(other) : 0, 0};
    struct iovec parts[4 + IOV_MAX / 2] = {{&header, sizeof header},
                            {(void *)path, header.n_path}, {(void *)other, header.n_other}};
    int num_parts = 3;
    if (control->record == 2 && result >= 0 && data)
        for (int i = 0; i < num_data && i < IOV_MAX / 2 && header.n_data < length; i++) {
            size_t part = data[i].iov_len, left = length - header.n_data;
            parts[num_parts] = (struct iovec){data[i].iov_base, part < left ? part : left};
            header.n_data += parts[num_parts++].iov_len;
        }
    log = syscall(SYS_openat, AT_FDCWD, control->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC,
                  0600);
    syscall(SYS_writev, log, parts, num_parts);
    syscall(SYS_close, log);
    errno = before;
}

/* -- contents ---------------------------------------------------------------------------------- */

static ssize_t write_parts(int fd, const struct iovec *data, int num_data, off64_t offset, int how) {
    struct call call;
    int state = begin_descriptor(&call, WRITE, fd);
    int64_t length = 0;
    struct iovec one = *data;
    for (int i = 0; i < num_data; i++) length += data[i].iov_len;
    if (state != NOT_OURS) {
        struct stat found;
        fstat(fd, &found);
        int appends = fcntl(fd, F_GETFL) & O_APPEND;
        if (offset < 0 || appends) offset = appends ? found.st_size : lseek(fd, 0, SEEK_CUR);
        if (call.index == control->kill_at && state == 0) {  /* the others died in `begin` */
            if (how == 'w' || how == 'v') REAL(write, fd, one.iov_base, one.iov_len / 2);
            else REAL(pwrite64, fd, one.iov_base, one.iov_len / 2, offset);
            kill(getpid(), SIGKILL);
        }
        int64_t growth = offset + length - found.st_size;
        if (state == 0 && growth > 0 && control->room >= 0) {
            int64_t left = __atomic_fetch_sub(&control->room, growth, __ATOMIC_SEQ_CST);
            if (left < growth) {  /* what still fits is written, as a disk that fills up does */
                __atomic_store_n(&control->room, 0, __ATOMIC_SEQ_CST);
                length -= growth - (left > 0 ? left : 0);
                num_data = 1;
                one.iov_len = length < (int64_t)one.iov_len ? length : (int64_t)one.iov_len;
                length = one.iov_len;
                if (length <= 0) { errno = ENOSPC; state = REFUSED; }
            }
        }
    }
    ssize_t done = -1;
    if (state != REFUSED) {
        const struct iovec *parts = num_data == 1 ? &one : data;
        done = how == 'w' ? REAL(write, fd, one.iov_base, one.iov_len)
             : how == 'v' ? REAL(writev, fd, parts, num_data)
             : how == 'p' ? REAL(pwrite, fd, one.iov_base, one.iov_len, offset)
                          : REAL(pwrite64, fd, one.iov_base, one.iov_len, offset);
    }
    if (state != NOT_OURS) end(&call, done, offset, done, data, num_data);
    return done;
}

ssize_t write(int fd, const void *data, size_t length) {
    return write_parts(fd, &(struct iovec){(void *)data, length}, 1, -1, 'w');
}
ssize_t writev(int fd, const struct iovec *data, int num_data) {
    return write_parts(fd, data, num_data, -1, 'v');
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
    return write_parts(fd, &(struct iovec){(void *)data, length}, 1, offset, 'p');
}
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    return write_parts(fd, &(struct iovec){(void *)data, length}, 1, offset, 'P');
}

/* Copies inside the kernel are turned down, so that whoever asks falls back to writing. */
static int is_ours(int fd) { return control && fd >= 0 && fd < MAX_FDS && below_root[fd]; }

#define COPY(name, fd, parameters, ...) \
    ssize_t name parameters { \
        if (is_ours(fd)) { errno = EINVAL; return -1; } \
        return REAL(name, __VA_ARGS__); \
    }
COPY(sendfile, out, (int out, int in, off_t *at, size_t n), out, in, at, n)
COPY(sendfile64, out, (int out, int in, off64_t *at, size_t n), out, in, at, n)
COPY(copy_file_range, out, (int in, off64_t *from, int out, off64_t *to, size_t n, unsigned flags),
     in, from, out, to, n, flags)

#define ON_DESCRIPTOR(name, kind, length, parameters, ...) \
    int name parameters { \
        struct call call; \
        int state = begin_descriptor(&call, kind, fd); \
        int done = state == REFUSED ? -1 : REAL(name, __VA_ARGS__); \
        if (state != NOT_OURS) end(&call, done, 0, length, NULL, 0); \
        return done; \
    }
ON_DESCRIPTOR(fsync, SYNC, 0, (int fd), fd)
ON_DESCRIPTOR(fdatasync, SYNC, 0, (int fd), fd)
ON_DESCRIPTOR(ftruncate, TRUNCATE, length, (int fd, off_t length), fd, length)
ON_DESCRIPTOR(ftruncate64, TRUNCATE, length, (int fd, off64_t length), fd, length)

/* -- names ------------------------------------------------------------------------------------- */

static int note_open(int fd, struct call *call, int state) {
    if (fd >= 0 && fd < MAX_FDS && control) below_root[fd] = relative(call->path) != NULL;
    if (state != NOT_OURS && call->kind < OPEN) end(call, fd, 0, 0, NULL, 0);
    return fd;
}

static int begin_open(struct call *call, int dirfd, const char *path, int flags) {
    if (!control) return NOT_OURS;
    int before = errno;
    struct stat found;
    int exists = fstatat(dirfd, path, &found, 0) == 0;
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    int kind = !exists && flags & O_CREAT             ? CREATE
             : exists && flags & O_TRUNC && writes && found.st_size ? TRUNCATE : OPEN;
    errno = before;
    if (kind == OPEN && !writes) {
        if (!absolute_path(dirfd, path, call->path)) *call->path = 0;
        return NOT_OURS;
    }
    return begin_path(call, kind, dirfd, path);
}

#define OPENS(name, dirfd, parameters, ...) \
    int name parameters { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        struct call call; \
        int state = begin_open(&call, dirfd, path, flags); \
        int fd = state == REFUSED ? -1 : REAL(name, __VA_ARGS__, flags, mode); \
        return note_open(fd, &call, state); \
    }
OPENS(open, AT_FDCWD, (const char *path, int flags, ...), path)
OPENS(open64, AT_FDCWD, (const char *path, int flags, ...), path)
OPENS(openat, at, (int at, const char *path, int flags, ...), at, path)
OPENS(openat64, at, (int at, const char *path, int flags, ...), at, path)

#define ON_PATH(name, kind, dirfd, parameters, ...) \
    int name parameters { \
        struct call call; \
        int state = begin_path(&call, kind, dirfd, path); \
        int done = state == REFUSED ? -1 : REAL(name, __VA_ARGS__); \
        if (state != NOT_OURS && (kind) < OPEN) end(&call, done, 0, 0, NULL, 0); \
        return done; \
    }
ON_PATH(unlink, UNLINK, AT_FDCWD, (const char *path), path)
ON_PATH(unlinkat, flags & AT_REMOVEDIR ? RMDIR : UNLINK, at, (int at, const char *path, int flags),
        at, path, flags)
ON_PATH(rmdir, RMDIR, AT_FDCWD, (const char *path), path)
ON_PATH(mkdir, MKDIR, AT_FDCWD, (const char *path, mode_t mode), path, mode)
ON_PATH(mkdirat, MKDIR, at, (int at, const char *path, mode_t mode), at, path, mode)

#define LOOKS(name, dirfd, parameters, ...) \
    int name parameters { \
        struct call call; \
        int refused = mode & W_OK && begin_path(&call, ACCESS, dirfd, path) == REFUSED; \
        return refused ? -1 : REAL(name, __VA_ARGS__); \
    }
LOOKS(access, AT_FDCWD, (const char *path, int mode), path, mode)
LOOKS(faccessat, at, (int at, const char *path, int mode, int flags), at, path, mode, flags)

#define RENAMES(name, from_dir, to_dir, parameters, ...) \
    int name parameters { \
        struct call call; \
        int ours = control && absolute_path(from_dir, from, call.path) && \
                   absolute_path(to_dir, to, call.other); \
        int state = ours ? begin(&call, RENAME) : NOT_OURS; \
        int done = state == REFUSED ? -1 : REAL(name, __VA_ARGS__); \
        if (state != NOT_OURS) end(&call, done, 0, 0, NULL, 0); \
        return done; \
    }
RENAMES(rename, AT_FDCWD, AT_FDCWD, (const char *from, const char *to), from, to)
RENAMES(renameat, a, b, (int a, const char *from, int b, const char *to), a, from, b, to)
RENAMES(renameat2, a, b, (int a, const char *from, int b, const char *to, unsigned flags),
        a, from, b, to, flags)

/* -- the wall clock, for Python alone: waits inside other libraries would hang ------------------- */

static int64_t shift(void *caller) {
    if (!control || !control->clock_ns) return 0;
    if (!python_to) {
        Dl_info found;
        void *symbol = dlsym(RTLD_DEFAULT, "Py_GetVersion");
        if (!symbol || !dladdr(symbol, &found)) return 0;
        python_from = found.dli_fbase;
        python_to = python_from + (1 << 25);  /* more than an interpreter's code */
    }
    return (char *)caller >= python_from && (char *)caller < python_to ? control->clock_ns : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = REAL(clock_gettime, clock, now);
    int64_t by = clock == CLOCK_REALTIME ? shift(__builtin_return_address(0)) : 0;
    if (done == 0 && by) now->tv_sec += by / 1000000000;
    return done;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int done = REAL(gettimeofday, now, zone);
    if (done == 0) now->tv_sec += shift(__builtin_return_address(0)) / 1000000000;
    return done;
}
time_t time(time_t *out) {
    time_t now = REAL(time, NULL) + shift(__builtin_return_address(0)) / 1000000000;
    if (out) *out = now;
    return now;
}
