/* SPDX-License-Identifier: Apache-2.0 */
/* The backup in a preallocated file or on a block device, past the page cache (O_DIRECT). */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "engine/backup/backup.h"

struct backup_file {
	int fd;
};

static int file_write(void *ctx, const struct iovec *iov, int iov_count, uint64_t offset)
{
	const struct backup_file *file = ctx;
	struct iovec rest[ISWI_BACKUP_BATCH_MAX];
	int first = 0;

	memcpy(rest, iov, (size_t)iov_count * sizeof(*iov));
	while (first < iov_count) {
		ssize_t n = pwritev(file->fd, rest + first, iov_count - first, (off_t)offset);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		offset += (uint64_t)n;
		while (first < iov_count && (size_t)n >= rest[first].iov_len)
			n -= (ssize_t)rest[first++].iov_len;
		if (n) {
			rest[first].iov_base = (char *)rest[first].iov_base + n;
			rest[first].iov_len -= (size_t)n;
		}
	}
	return 0;
}

static int file_read(void *ctx, void *buf, uint32_t bytes, uint64_t offset)
{
	const struct backup_file *file = ctx;
	uint32_t got = 0;

	while (got < bytes) {
		ssize_t n = pread(file->fd, (char *)buf + got, bytes - got, (off_t)(offset + got));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		got += (uint32_t)n;
	}
	return 0;
}

static int file_sync(void *ctx)
{
	const struct backup_file *file = ctx;

	return fdatasync(file->fd) ? -errno : 0;
}

static void file_destroy(void *ctx)
{
	struct backup_file *file = ctx;

	close(file->fd);
	free(file);
}

const struct iswi_backup_ops iswi_backup_file_ops = {
	.name = "file",
	.write = file_write,
	.read = file_read,
	.sync = file_sync,
	.destroy = file_destroy,
};

/* Regular files get all their blocks now: a full disk must not be found out at swap-out. */
static int claim_space(int fd, const char *path, uint64_t bytes, struct isw_error *error)
{
	uint64_t device_bytes;
	struct stat st;

	if (fstat(fd, &st) < 0)
		return iswi_error(error, -errno, "cannot look at the backup %s: %s", path,
				  strerror(errno));
	if (S_ISBLK(st.st_mode)) {
		if (ioctl(fd, BLKGETSIZE64, &device_bytes) < 0)
			return iswi_error(error, -errno, "cannot tell the size of %s: %s", path,
					  strerror(errno));
		if (device_bytes < bytes)
			return iswi_error(error, -ENOSPC,
					  "the backup %s has %llu MiB, the device needs %llu MiB; "
					  "use a larger one or a smaller --size",
					  path, (unsigned long long)(device_bytes >> 20),
					  (unsigned long long)(bytes >> 20));
		return 0;
	}
	if (!S_ISREG(st.st_mode))
		return iswi_error(error, -EINVAL,
				  "the backup %s is neither a regular file nor a block device",
				  path);
	if (fallocate(fd, 0, 0, (off_t)bytes) < 0)
		return iswi_error(error, -errno,
				  "cannot reserve %llu MiB for the backup %s: %s; free space there "
				  "or name another place with --backup",
				  (unsigned long long)(bytes >> 20), path, strerror(errno));
	return 0;
}

/*
 * A file system that runs out of space in the middle leaves what it had reserved so far: a full
 * disk. old_bytes: the file's length before, negative when there was none.
 */
static void unclaim_space(int fd, const char *path, off_t old_bytes)
{
	if (old_bytes < 0)
		unlink(path);
	else if (ftruncate(fd, old_bytes) < 0)
		return; /* not a regular file, or nothing can be done */
}

int iswi_backup_file_open(const char *path, uint64_t bytes, bool predecessors, void **ctx_out,
			  struct isw_error *error)
{
	uint32_t wait_ms_max = predecessors ? ISWI_OWNER_WAIT_MS : 0;
	struct backup_file *file = malloc(sizeof(*file));
	struct stat st;
	bool is_new;
	int code;

	if (!file)
		return iswi_error(error, -ENOMEM, "no memory for the backup");
	file->fd = iswi_backup_open(path, predecessors, &st, &is_new, error);
	if (file->fd < 0) {
		code = file->fd;
		goto err_free;
	}
	if (predecessors && S_ISREG(st.st_mode) && (uint64_t)st.st_size < bytes) {
		code = iswi_error(error, -EBADMSG,
				  "the backup %s was cut short to %llu bytes: it is not what the "
				  "device has written to",
				  path, (unsigned long long)st.st_size);
		goto err_close;
	}
	code = iswi_flock_wait(file->fd, wait_ms_max);
	if (code) {
		code = iswi_error(error, code,
				  "the backup %s belongs to another running device process", path);
		goto err_close;
	}
	code = claim_space(file->fd, path, bytes, error);
	if (code && !predecessors) {
		unclaim_space(file->fd, path, is_new ? -1 : st.st_size);
	}
	if (code)
		goto err_close;
	*ctx_out = file;
	return 0;

err_close:
	close(file->fd);
err_free:
	free(file);
	return code;
}
