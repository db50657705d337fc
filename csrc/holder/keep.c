/* SPDX-License-Identifier: Apache-2.0 */
/* The descriptors that outlive the device process, and the locked mapping of its state file. */
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

static void unmap_state(struct iswi_keep *keep)
{
	if (keep->state)
		munmap(keep->state, keep->state_bytes);
	keep->state = NULL;
	keep->state_bytes = 0;
}

/*
 * The pages of a tmpfs file can be swapped out as soon as nobody has them locked, and the only
 * place they could go is the device that waits for them: we hold them while the process is gone.
 * A refusal is no reason to hold nothing: `status` reads back how much of us is locked.
 */
static void map_state(struct iswi_keep *keep, int fd)
{
	struct stat attr;
	void *state;

	unmap_state(keep);
	if (fstat(fd, &attr) != 0 || attr.st_size <= 0)
		return;
	state = mmap(NULL, (size_t)attr.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (state == MAP_FAILED)
		return;
	keep->state = state;
	keep->state_bytes = (size_t)attr.st_size;
	(void)mlock(state, keep->state_bytes);
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
		close(slot->fd);
	else
		slot = find(keep, "");
	if (!slot) {
		close(fd);
		return -ENOSPC;
	}
	snprintf(slot->name, sizeof(slot->name), "%s", name);
	slot->fd = fd;
	if (strcmp(name, ISWI_HOLD_STATE) == 0)
		map_state(keep, fd);
	return 0;
}

void iswi_keep_drop(struct iswi_keep *keep, const char *name)
{
	struct iswi_kept *slot = is_name(name) ? find(keep, name) : NULL;

	if (!slot)
		return;
	if (strcmp(name, ISWI_HOLD_STATE) == 0)
		unmap_state(keep);
	close(slot->fd);
	slot->name[0] = '\0';
}

/* What a standby needs to get ready; the rest would only have more copies than it must. */
static bool is_early(const char *name)
{
	return strcmp(name, ISWI_HOLD_STATE) == 0 || strcmp(name, ISWI_HOLD_SPEC) == 0;
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
