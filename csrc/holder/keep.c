/* SPDX-License-Identifier: Apache-2.0 */
/* The descriptors that outlive the device process, and what of their files is locked in memory. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "holder/holder.h"

static struct iswi_kept *find(struct iswi_keep *keep, const char *name)
{
	for (uint32_t i = 0; i < ISWI_HOLD_KEPT_MAX; i++)
		if (strcmp(keep->kept[i].name, name) == 0)
			return &keep->kept[i];
	return NULL;
}

static bool is_name(const char *name)
{
	size_t length = strlen(name);

	return length > 0 && length < ISWI_HOLD_NAME_MAX &&
	       strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == length;
}

/* What a standby needs to get ready, and again when it takes over, before the device serves. */
static bool is_early(const char *name)
{
	return strcmp(name, ISWI_HOLD_STATE) == 0 || strcmp(name, ISWI_HOLD_SPEC) == 0 ||
	       strcmp(name, ISWI_HOLD_KEY) == 0;
}

/* What a successor reads before the device serves, or while that may need it. */
static bool is_read(const char *name)
{
	return is_early(name) || strcmp(name, ISWI_HOLD_UNSAID) == 0;
}

/*
 * The pages of a tmpfs file can be swapped out as soon as no process has them locked, and the only
 * place they could go is the device that waits for them: so we lock them while no device process
 * does. A refusal is not fatal: `status` reads back how much of the holder is locked. No core file
 * of the holder has them.
 */
static void lock_file(struct iswi_kept *slot)
{
	struct stat attr;
	void *locked;

	if (fstat(slot->fd, &attr) != 0 || attr.st_size <= 0)
		return;
	locked = mmap(NULL, (size_t)attr.st_size, PROT_READ, MAP_SHARED, slot->fd, 0);
	if (locked == MAP_FAILED)
		return;
	slot->locked = locked;
	slot->locked_bytes = (size_t)attr.st_size;
	(void)mlock(locked, slot->locked_bytes);
	(void)madvise(locked, slot->locked_bytes, MADV_DONTDUMP);
}

static void let_go(struct iswi_kept *slot)
{
	if (slot->locked)
		munmap(slot->locked, slot->locked_bytes);
	close(slot->fd);
	*slot = (struct iswi_kept){.fd = -1};
}

int iswi_keep_put(struct iswi_keep *keep, const char *name, int fd)
{
	struct iswi_kept *slot;

	if (!is_name(name)) {
		close(fd);
		return -EINVAL;
	}
	if (strcmp(name, ISWI_HOLD_LOG) == 0) {
		dup2(fd, STDOUT_FILENO);
		dup2(fd, STDERR_FILENO);
		close(fd);
		return 0;
	}
	slot = find(keep, name);
	if (slot)
		let_go(slot);
	else
		slot = find(keep, "");
	if (!slot) {
		close(fd);
		return -ENOSPC;
	}
	snprintf(slot->name, sizeof(slot->name), "%s", name);
	slot->fd = fd;
	if (is_read(name))
		lock_file(slot);
	return 0;
}

void iswi_keep_drop(struct iswi_keep *keep, const char *name)
{
	struct iswi_kept *slot = is_name(name) ? find(keep, name) : NULL;

	if (slot)
		let_go(slot);
}

bool iswi_keep_has(struct iswi_keep *keep, const char *name)
{
	return find(keep, name) != NULL;
}

uint32_t iswi_keep_list(const struct iswi_keep *keep, bool only_early, char *names_out,
			int *fds_out)
{
	size_t used = 0;
	uint32_t count = 0;

	for (uint32_t i = 0; i < ISWI_HOLD_KEPT_MAX; i++) {
		const struct iswi_kept *slot = &keep->kept[i];
		size_t length = strlen(slot->name);

		if (length == 0 || (only_early && !is_early(slot->name)))
			continue;
		used += (size_t)snprintf(names_out + used, ISWI_HOLD_NAMES_MAX - used, "%s%s",
					 count ? "," : "", slot->name);
		fds_out[count++] = slot->fd;
	}
	if (count == 0)
		snprintf(names_out, ISWI_HOLD_NAMES_MAX, "-");
	return count;
}
