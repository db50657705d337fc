// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE 1
#include "store/slab_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME_BYTES 160

static const char *const kinds[] = {
	[ISWI_SLAB_FILE_NEW] = "new",
	[ISWI_SLAB_FILE_FREE] = "free",
	[ISWI_SLAB_FILE_DIRTY] = "dirty",
	[ISWI_SLAB_FILE_MAPPED] = "mapped",
};

int iswi_slab_dir_open(struct iswi_slab_dir *dir, const char *path, struct isw_error *error)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

	if (fd < 0)
		return iswi_error(error, -errno, "%s cannot be opened: %s", path, strerror(errno));
	/*
	 * A predecessor that was killed holds this until its last thread has left the kernel, so
	 * nothing of it can still write into a slab.
	 */
	if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
		int err = errno == EWOULDBLOCK ? -EBUSY : -errno;

		close(fd);
		return iswi_error(error, err, "%s: another daemon keeps its slabs there", path);
	}
	dir->fd = fd;
	dir->reserved = 0;
	return 0;
}

void iswi_slab_dir_close(struct iswi_slab_dir *dir)
{
	if (dir->fd >= 0)
		close(dir->fd);
	dir->fd = -1;
}

static void counter_text(uint64_t number, char *text_out)
{
	snprintf(text_out, NAME_BYTES, "next.%" PRIu64, number);
}

int iswi_slab_dir_begin(struct iswi_slab_dir *dir)
{
	char text[NAME_BYTES];
	int fd;

	counter_text(0, text);
	fd = openat(dir->fd, text, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	close(fd);
	dir->reserved = 0;
	return 0;
}

int iswi_slab_dir_reserve(struct iswi_slab_dir *dir)
{
	char from[NAME_BYTES], to[NAME_BYTES];

	counter_text(dir->reserved, from);
	counter_text(dir->reserved + ISWI_NUMBERS_RESERVED, to);
	if (renameat(dir->fd, from, dir->fd, to) != 0)
		return -errno;
	dir->reserved += ISWI_NUMBERS_RESERVED;
	return 0;
}

static void name_text(const struct iswi_slab_name *name, char *text_out)
{
	int used = snprintf(text_out, NAME_BYTES, "slab.%" PRIu64 ".%s", name->serial,
			    kinds[name->kind]);

	if (name->kind == ISWI_SLAB_FILE_MAPPED)
		snprintf(text_out + used, NAME_BYTES - (size_t)used,
			 ".%" PRIu64 ".%" PRIu32 ".%" PRIu64 ".%" PRIu32, name->lease, name->slot,
			 name->generation, name->tag);
}

bool iswi_slab_name_parse(const char *text, struct iswi_slab_name *name_out)
{
	struct iswi_slab_name name = {0};
	char kind[8] = "", again[NAME_BYTES];

	if (sscanf(text, "slab.%" SCNu64 ".%7[a-z].%" SCNu64 ".%" SCNu32 ".%" SCNu64 ".%" SCNu32,
		   &name.serial, kind, &name.lease, &name.slot, &name.generation, &name.tag) < 2)
		return false;
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(kinds); i++) {
		if (strcmp(kind, kinds[i]) != 0)
			continue;
		name.kind = (enum iswi_slab_kind)i;
		/* Ours if it is letter by letter what we should have written. */
		name_text(&name, again);
		*name_out = name;
		return name.serial != 0 && strcmp(again, text) == 0;
	}
	return false;
}

bool iswi_counter_parse(const char *text, uint64_t *number_out)
{
	char again[NAME_BYTES];

	if (sscanf(text, "next.%" SCNu64, number_out) != 1)
		return false;
	counter_text(*number_out, again);
	/* A counter so high that numbers would run out is none of ours. */
	return strcmp(again, text) == 0 && *number_out < (UINT64_MAX >> 8);
}

int iswi_slab_dir_make(const struct iswi_slab_dir *dir, const struct iswi_slab_name *name,
		       uint64_t bytes, int *fd_out)
{
	char text[NAME_BYTES];
	int fd, err;

	name_text(name, text);
	fd = openat(dir->fd, text, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)bytes) != 0) {
		err = -errno;
		close(fd);
		unlinkat(dir->fd, text, 0);
		return err;
	}
	*fd_out = fd;
	return 0;
}

int iswi_slab_dir_rename(const struct iswi_slab_dir *dir, struct iswi_slab_name *name,
			 const struct iswi_slab_name *to)
{
	char from_text[NAME_BYTES], to_text[NAME_BYTES];

	if (name->serial == 0)
		return 0;
	name_text(name, from_text);
	name_text(to, to_text);
	if (renameat(dir->fd, from_text, dir->fd, to_text) == 0)
		*name = *to;
	else if (errno == ENOENT) /* somebody has removed it: the slab ends with this process */
		name->serial = 0;
	else
		return -errno;
	return 0;
}

int iswi_slab_dir_become(const struct iswi_slab_dir *dir, struct iswi_slab_name *name,
			 enum iswi_slab_kind kind)
{
	const struct iswi_slab_name to = {.serial = name->serial, .kind = kind};

	return iswi_slab_dir_rename(dir, name, &to);
}

int iswi_slab_dir_unlink(const struct iswi_slab_dir *dir, struct iswi_slab_name *name)
{
	char text[NAME_BYTES];

	if (name->serial == 0)
		return 0;
	name_text(name, text);
	name->serial = 0;
	return unlinkat(dir->fd, text, 0) == 0 ? 0 : -errno;
}
