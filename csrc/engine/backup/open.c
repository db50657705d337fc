/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening the backup: it holds the memory of every program that swaps here, so it must be a file or
 * disk that no other user can read, replace or redirect. What is looked at is always what is open.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/backup/backup.h"

#define FLAGS (O_RDWR | O_DIRECT | O_CLOEXEC)

static int refused(struct isw_error *error, const char *path, const char *why)
{
	return iswi_error(error, -EACCES, "the backup %s %s; name another place with --backup",
			  path, why);
}

static int not_opened(struct isw_error *error, const char *path, int code)
{
	if (code == -ELOOP)
		return refused(error, path, "is a symbolic link to no block device of ours");
	return iswi_error(error, code,
			  "cannot open the backup %s for direct I/O: %s; name another place with "
			  "--backup",
			  path, strerror(-code));
}

/* Everything else is found from here, so that the directory looked at is the one that is used. */
static int open_directory(const char *path, const char **name_out)
{
	const char *slash = strrchr(path, '/');
	char *directory =
		slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
	int fd;

	if (!directory)
		return -ENOMEM;
	*name_out = !slash ? path : slash[1] ? slash + 1 : ".";
	fd = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	free(directory);
	return fd < 0 ? -errno : fd;
}

static bool is_ours(uid_t uid)
{
	return uid == 0 || uid == geteuid();
}

/*
 * The file itself, opened for nothing yet; -ENOENT where there is none. A link may lead to a disk
 * (/dev/disk/by-id/...) if nobody else can make it lead to another one: -ELOOP for any other.
 */
static int look_up(int directory, const char *name)
{
	int link = openat(directory, name, O_PATH | O_NOFOLLOW | O_CLOEXEC), found;
	struct stat st;
	bool is_good;

	if (link < 0)
		return -errno;
	if (fstat(link, &st) != 0 || !S_ISLNK(st.st_mode))
		return link;
	is_good = is_ours(st.st_uid);
	close(link);
	found = openat(directory, name, O_PATH | O_CLOEXEC);
	if (found >= 0 && is_good && fstat(found, &st) == 0 && S_ISBLK(st.st_mode))
		return found;
	if (found >= 0)
		close(found);
	return -ELOOP;
}

/* Of a block device the open itself is refused while a killed predecessor's is not gone. */
static int open_found(int found, uint32_t wait_ms_max)
{
	const struct timespec tick = {.tv_nsec = 5000000};
	struct stat st;
	/* O_EXCL on a block device: not while it is mounted or swap. */
	int flags = fstat(found, &st) == 0 && S_ISBLK(st.st_mode) ? FLAGS | O_EXCL : FLAGS;
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", found);
	for (uint32_t waited_ms = 0;; waited_ms += 5) {
		int fd = open(path, flags);

		if (fd >= 0 || errno != EBUSY || waited_ms >= wait_ms_max)
			return fd >= 0 ? fd : -errno;
		nanosleep(&tick, NULL);
	}
}

static int open_in(int directory, const char *name, uint32_t wait_ms_max, bool may_make,
		   bool *is_new_out)
{
	int found = look_up(directory, name), fd;

	if (found == -ENOENT && may_make) {
		fd = openat(directory, name, FLAGS | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
		*is_new_out = fd >= 0;
		return fd < 0 ? -errno : fd;
	}
	if (found < 0)
		return found;
	fd = open_found(found, wait_ms_max);
	close(found);
	return fd;
}

static int check_directory(int directory, const char *path, struct isw_error *error)
{
	struct stat st;

	if (fstat(directory, &st) != 0)
		return not_opened(error, path, -errno);
	/* A group may be the user's own; nobody reads our file by replacing it (check_file). */
	if ((st.st_mode & S_IWOTH) && !(st.st_mode & S_ISVTX))
		return refused(error, path, "lies in a directory that everybody may write to");
	return 0;
}

/*
 * predecessors: only whose it is. The pages are there already, and to refuse them for what somebody
 * has done to the mode meanwhile would lose them.
 */
static int check_file(const struct stat *st, bool predecessors, const char *path,
		      struct isw_error *error)
{
	bool is_disk = S_ISBLK(st->st_mode); /* as a rule of the group disk, which reads them all */

	if (is_disk ? !is_ours(st->st_uid) : st->st_uid != geteuid())
		return refused(error, path, "belongs to another user");
	if (predecessors)
		return 0;
	if (st->st_mode & (is_disk ? S_IRWXO : S_IRWXG | S_IRWXO))
		return refused(error, path, "can be read or written by other users");
	if (!is_disk && st->st_nlink != 1)
		return refused(error, path, "has another name too (a hard link)");
	return 0;
}

int iswi_backup_open(const char *path, bool predecessors, struct stat *st_out, bool *is_new_out,
		     struct isw_error *error)
{
	const char *name;
	int directory = open_directory(path, &name), fd, code;

	*is_new_out = false;
	if (directory < 0)
		return not_opened(error, path, directory);
	fd = predecessors ? 0 : check_directory(directory, path, error);
	if (fd < 0)
		goto out;
	fd = open_in(directory, name, predecessors ? ISWI_OWNER_WAIT_MS : 0, !predecessors,
		     is_new_out);
	if (fd < 0) {
		fd = not_opened(error, path, fd);
		goto out;
	}
	code = fstat(fd, st_out) != 0 ? not_opened(error, path, -errno)
				      : check_file(st_out, predecessors, path, error);
	if (code) {
		if (*is_new_out)
			unlinkat(directory, name, 0);
		close(fd);
		fd = code;
	}
out:
	close(directory);
	return fd;
}
