/* Stand between a process and the files below one directory (LD_PRELOAD): log what is done to them,
 * in order, and let chosen calls fail.
 *
 *   DISK_ROOT     the directory, absolute and without links
 *   DISK_LOG      file that gets a `struct record` for each operation, with its names and bytes
 *   DISK_CONTROL  file that holds a `struct control`; whoever maps it counts calls and fails them
 *
 * What is done through a memory map is not seen. Of SQLite's files that is `-shm`, which it makes
 * anew. Calls go straight to the kernel, so nothing of the C library is looked up. */

#define _GNU_SOURCE
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
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, CREATE, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, MKDIR, LINK };

struct record {
    int64_t inode, offset, site;
    int32_t kind, error, path_len, other_len;
    int64_t data_len;
};

/* Up to `most` calls from number `first` on whose kind is in `kinds` (bits) fail with `error`.
 * With `is_short` the first write among them writes half. The error -1 ends the process. */
struct control {
    int64_t num_calls, first, most, error, kinds, is_short, num_failed;
};

#define MAX_FDS 65536
static unsigned char is_watched[MAX_FDS];
static char root[PATH_MAX];
static size_t root_len;
static int log_fd = -1;
static pid_t own_pid;
static struct control unused, *control = &unused;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void start(void) {
    const char *name = getenv("DISK_ROOT");
    if (!name || strlen(name) >= PATH_MAX) return;
    strcpy(root, name);
    root_len = strlen(root);
    own_pid = syscall(SYS_getpid);
    if ((name = getenv("DISK_LOG")))
        log_fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_APPEND | O_CLOEXEC, 0);
    if ((name = getenv("DISK_CONTROL"))) {
        int fd = syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
        void *at = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) abort();
        control = at;
        syscall(SYS_close, fd);
    }
}

/* Write the absolute path to `full`; return whether it is the directory or below it. */
static int is_below(int dir, const char *path, char *full) {
    if (!root_len) return 0;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_MAX) return 0;
        strcpy(full, path);
    } else {
        char link[64] = "/proc/self/cwd";
        if (dir != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t len = readlink(link, full, PATH_MAX - 1);
        if (len < 0 || len + 1 + strlen(path) >= PATH_MAX) return 0;
        full[len] = '/';
        strcpy(full + len + 1, path);
    }
    return !strncmp(full, root, root_len) && (full[root_len] == '/' || !full[root_len]);
}

static int is_seen(int fd) { return fd >= 0 && fd < MAX_FDS && is_watched[fd]; }

static int64_t inode_at(const char *path) {
    struct stat found;
    return syscall(SYS_newfstatat, AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) ? 0 : found.st_ino;
}

static int64_t inode_of(int fd) {
    struct stat found;
    return syscall(SYS_fstat, fd, &found) ? 0 : found.st_ino;
}

/* Count a call; return the error it fails with, or 0. The mutex is held until `done`. */
static int begin(int kind) {
    pthread_mutex_lock(&mutex);
    int64_t site = control->num_calls++;
    int is_over = control->num_failed >= control->most;
    if (site < control->first || is_over || !(control->kinds >> kind & 1)) return 0;
    control->num_failed++;
    if (control->error < 0) syscall(SYS_kill, own_pid, SIGKILL);
    return control->error;
}

/* Log a call that returned `result`, and return that with its errno. */
static long done(int kind, long result, int64_t inode, int64_t offset, const char *path,
                 const char *other, const void *data) {
    int error = result < 0 ? errno : 0;
    const char *names[] = {path ? path + root_len : "", other ? other + root_len : ""};
    struct record head = {inode, offset, control->num_calls - 1, kind, error, strlen(names[0]),
                          strlen(names[1]), data && result > 0 ? result : 0};
    struct iovec parts[] = {{&head, sizeof head},
                            {(void *)names[0], head.path_len},
                            {(void *)names[1], head.other_len},
                            {(void *)data, head.data_len}};
    if (log_fd >= 0) {
        ssize_t all = sizeof head + head.path_len + head.other_len + head.data_len;
        if (syscall(SYS_writev, log_fd, parts, 4) != all) abort();
    }
    pthread_mutex_unlock(&mutex);
    errno = error;
    return result;
}

static long fail(int error) {
    errno = error;
    return -1;
}

static int do_open(int dir, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if (!is_below(dir, path, full)) return syscall(SYS_openat, dir, path, flags, mode);
    int is_new = flags & O_CREAT && !inode_at(full);
    int error = begin(is_new ? CREATE : OPEN);
    long fd = error ? fail(error) : syscall(SYS_openat, dir, path, flags, mode);
    if (fd >= 0 && fd < MAX_FDS) is_watched[fd] = 1;
    if (fd >= 0 && flags & O_TRUNC && !is_new) {
        done(TRUNCATE, 0, inode_of(fd), 0, full, NULL, NULL);
        return fd;
    }
    return done(is_new ? CREATE : OPEN, fd, fd < 0 ? 0 : inode_of(fd), 0, full, NULL, NULL);
}

#define MODE_OF(flags)                                \
    mode_t mode = 0;                                  \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {          \
        va_list rest;                                 \
        va_start(rest, flags);                        \
        mode = va_arg(rest, mode_t);                  \
        va_end(rest);                                 \
    }

int open(const char *path, int flags, ...) {
    MODE_OF(flags)
    return do_open(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE_OF(flags)
    return do_open(AT_FDCWD, path, flags, mode);
}

int openat(int dir, const char *path, int flags, ...) {
    MODE_OF(flags)
    return do_open(dir, path, flags, mode);
}

int openat64(int dir, const char *path, int flags, ...) {
    MODE_OF(flags)
    return do_open(dir, path, flags, mode);
}

int creat(const char *path, mode_t mode) {
    return do_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

int close(int fd) {
    /* A child after vfork closes what it inherited, and these books are its parent's. */
    if (is_seen(fd) && syscall(SYS_getpid) == own_pid) is_watched[fd] = 0;
    return syscall(SYS_close, fd);
}

/* Write `data`; the offset is the file's own if it is negative. */
static ssize_t do_write(int fd, const void *data, size_t len, off_t offset) {
    int error = begin(WRITE);
    if (error && control->is_short) {
        control->is_short = error = 0;
        len /= 2;
    }
    off_t at = offset;
    if (at < 0)
        at = syscall(SYS_lseek, fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
    long result = error        ? fail(error)
                  : offset < 0 ? syscall(SYS_write, fd, data, len)
                               : syscall(SYS_pwrite64, fd, data, len, offset);
    return done(WRITE, result, inode_of(fd), at, NULL, NULL, data);
}

static ssize_t do_writev(int fd, const struct iovec *parts, int num_parts, off_t offset) {
    size_t len = 0;
    for (int i = 0; i < num_parts; i++) len += parts[i].iov_len;
    char *whole = malloc(len + 1), *end = whole;
    if (!whole) return fail(ENOMEM);
    for (int i = 0; i < num_parts; i++) end = mempcpy(end, parts[i].iov_base, parts[i].iov_len);
    ssize_t result = do_write(fd, whole, len, offset);
    int error = errno;
    free(whole);
    errno = error;
    return result;
}

ssize_t write(int fd, const void *data, size_t len) {
    return is_seen(fd) ? do_write(fd, data, len, -1) : syscall(SYS_write, fd, data, len);
}

ssize_t pwrite64(int fd, const void *data, size_t len, off64_t offset) {
    return is_seen(fd) ? do_write(fd, data, len, offset)
                       : syscall(SYS_pwrite64, fd, data, len, offset);
}

ssize_t pwrite(int fd, const void *data, size_t len, off_t offset) {
    return pwrite64(fd, data, len, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int num_parts) {
    return is_seen(fd) ? do_writev(fd, parts, num_parts, -1)
                       : syscall(SYS_writev, fd, parts, num_parts);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int num_parts, off64_t offset, int flags) {
    return is_seen(fd) ? do_writev(fd, parts, num_parts, offset)
                       : syscall(SYS_pwritev2, fd, parts, num_parts, offset, 0, flags);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int num_parts, off_t offset, int flags) {
    return pwritev64v2(fd, parts, num_parts, offset, flags);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int num_parts, off64_t offset) {
    return pwritev64v2(fd, parts, num_parts, offset, 0);
}

ssize_t pwritev(int fd, const struct iovec *parts, int num_parts, off_t offset) {
    return pwritev64v2(fd, parts, num_parts, offset, 0);
}

int ftruncate64(int fd, off64_t size) {
    if (!is_seen(fd)) return syscall(SYS_ftruncate, fd, size);
    int error = begin(TRUNCATE);
    long result = error ? fail(error) : syscall(SYS_ftruncate, fd, size);
    return done(TRUNCATE, result, inode_of(fd), size, NULL, NULL, NULL);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int do_sync(int fd, long call) {
    if (!is_seen(fd)) return syscall(call, fd);
    int error = begin(SYNC);
    /* The disk is simulated: the log tells what is on it, and nobody waits for the real one. */
    return done(SYNC, error ? fail(error) : 0, inode_of(fd), 0, NULL, NULL, NULL);
}

int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }

/* `sync_file_range` promises nothing of a crash, so it is none of the calls above. */

static int do_names(int kind, long call, int dirs[2], const char *paths[2], int flags) {
    char full[2][PATH_MAX];
    int is_seen = is_below(dirs[0], paths[0], full[0]) & is_below(dirs[1], paths[1], full[1]);
    if (!is_seen) return syscall(call, dirs[0], paths[0], dirs[1], paths[1], flags);
    int error = begin(kind);
    int64_t inode = inode_at(full[0]);
    long result = error ? fail(error) : syscall(call, dirs[0], paths[0], dirs[1], paths[1], flags);
    return done(kind, result, inode, 0, full[0], full[1], NULL);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    const char *paths[] = {from, to};
    return do_names(RENAME, SYS_renameat2, (int[]){from_dir, to_dir}, paths, flags);
}

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    return renameat2(from_dir, from, to_dir, to, 0);
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    const char *paths[] = {from, to};
    return do_names(LINK, SYS_linkat, (int[]){from_dir, to_dir}, paths, flags);
}

int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

static int do_name(int kind, long call, int dir, const char *path, int flags) {
    char full[PATH_MAX];
    if (!is_below(dir, path, full)) return syscall(call, dir, path, flags);
    int error = begin(kind);
    long result = error ? fail(error) : syscall(call, dir, path, flags);
    return done(kind, result, inode_at(full), 0, full, NULL, NULL);
}

int unlinkat(int dir, const char *path, int flags) {
    return do_name(UNLINK, SYS_unlinkat, dir, path, flags);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dir, const char *path, mode_t mode) {
    return do_name(MKDIR, SYS_mkdirat, dir, path, mode);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
