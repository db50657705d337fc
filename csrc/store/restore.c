// SPDX-License-Identifier: Apache-2.0
/*
 * What a predecessor left in the directory of slabs. A file is taken over only if it is certainly
 * what its name says. Any other file is removed, and a note says why.
 */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/store.h"

/* What is in the directory. */
struct found {
	char **texts;
	uint32_t count;
	uint32_t size;
};

static void free_found(struct found *found)
{
	for (uint32_t i = 0; i < found->count; i++)
		free(found->texts[i]);
	free(found->texts);
}

static int add_found(struct found *found, const char *text)
{
	if (found->count == found->size) {
		uint32_t size = found->size == 0 ? 64 : 2 * found->size;
		char **texts = realloc(found->texts, size * sizeof(*texts));

		if (texts == NULL)
			return -ENOMEM;
		found->texts = texts;
		found->size = size;
	}
	found->texts[found->count] = strdup(text);
	if (found->texts[found->count] == NULL)
		return -ENOMEM;
	found->count++;
	return 0;
}

static int list(int dir_fd, struct found *found)
{
	int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), err = 0;
	const struct dirent *entry;
	DIR *dir;

	if (fd < 0)
		return -errno;
	dir = fdopendir(fd);
	if (dir == NULL) {
		err = -errno;
		close(fd);
		return err;
	}
	while (err == 0 && (errno = 0, entry = readdir(dir)) != NULL)
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
			err = add_found(found, entry->d_name);
	if (err == 0)
		err = -errno;
	closedir(dir);
	return err;
}

/* Removes a file that must not be served. */
static int refuse(isw_store *store, const char *text, const char *why, struct isw_error *error)
{
	struct isw_error *note =
		store->note_count < ISWI_STORE_NOTES_MAX ? &store->notes[store->note_count] : NULL;

	store->note_count++;
	iswi_error(note, -EINVAL, "%s: %s", text, why);
	if (unlinkat(store->dir.fd, text, 0) == 0)
		return 0;
	return iswi_error(error, -errno, "%s in the directory of slabs (%s) cannot be removed: %s",
			  text, why, strerror(errno));
}

/*
 * New numbers are above all used ones. Without a counter, or with two, it is unknown what the files
 * are: all of them are removed, the counters last.
 */
static int take_counter(isw_store *store, struct found *found, struct isw_error *error)
{
	uint32_t counters = 0;
	uint64_t number;
	int err = 0;

	for (uint32_t i = 0; i < found->count; i++)
		if (iswi_counter_parse(found->texts[i], &number)) {
			counters++;
			store->dir.reserved = number;
		}
	if (counters == 1)
		goto numbers;
	for (int pass = 0; pass < 2; pass++)
		for (uint32_t i = 0; i < found->count && err == 0; i++)
			if (iswi_counter_parse(found->texts[i], &number) == (pass == 1))
				err = refuse(store, found->texts[i],
					     "found without the one counter of a donor's directory",
					     error);
	if (err != 0)
		return err;
	for (uint32_t i = 0; i < found->count; i++)
		free(found->texts[i]);
	found->count = 0;
	err = iswi_slab_dir_begin(&store->dir);
	if (err != 0)
		return iswi_error(error, err, "the directory of slabs takes no file: %s",
				  strerror(-err));
numbers:
	store->lease_last = store->generation_last = store->serial_last = store->dir.reserved;
	return 0;
}

/* What is wrong with it; NULL: nothing. */
static const char *bad_numbers(const isw_store *store, const struct iswi_slab_name *name)
{
	const uint64_t last = store->dir.reserved;

	if (name->serial > last || name->lease > last || name->generation > last)
		return "a number that was never given out";
	if (name->kind == ISWI_SLAB_FILE_MAPPED &&
	    (name->lease == 0 || name->generation == 0 || name->slot >= ISWI_STORE_SLOTS_MAX))
		return "no lease could have it";
	return NULL;
}

static const char *bad_file(const isw_store *store, int fd)
{
	const uint64_t bytes = store->config.slab_bytes;
	struct stat stat;

	if (fd < 0 || fstat(fd, &stat) != 0 || !S_ISREG(stat.st_mode))
		return "not a file that can be opened";
	if (stat.st_uid != geteuid())
		return "of another user";
	if (stat.st_nlink != 1)
		return "it has another name, too";
	if ((uint64_t)stat.st_size != bytes)
		return "not of the size of a slab";
	if ((uint64_t)stat.st_blocks * 512 < bytes)
		return "parts of it are missing";
	return NULL;
}

static enum iswi_slab_state state_of(enum iswi_slab_kind kind)
{
	switch (kind) {
	case ISWI_SLAB_FILE_FREE:
		return ISWI_SLAB_FREE;
	case ISWI_SLAB_FILE_MAPPED:
		return ISWI_SLAB_ORPHAN;
	default:
		return ISWI_SLAB_DIRTY;
	}
}

static int take_slab(isw_store *store, const char *text, const struct iswi_slab_name *name,
		     struct iswi_store_slab *slab, struct isw_error *error)
{
	int fd = openat(store->dir.fd, text, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), err = 0;
	const char *why = bad_numbers(store, name);

	if (why == NULL)
		why = bad_file(store, fd);
	if (why == NULL && name->kind != ISWI_SLAB_FILE_NEW) {
		err = iswi_slab_mem_open(&slab->mem, fd, store->config.slab_bytes);
		if (err == 0) {
			slab->name = *name;
			slab->state = state_of(name->kind);
		} else {
			iswi_error(error, err, "slab %s cannot be mapped: %s", text,
				   strerror(-err));
		}
	}
	if (fd >= 0)
		close(fd);
	return why == NULL ? err : refuse(store, text, why, error);
}

static int take_file(isw_store *store, const char *text, uint32_t *count, struct isw_error *error)
{
	struct iswi_slab_name name;
	uint64_t number;
	int err;

	if (iswi_counter_parse(text, &number))
		return 0;
	if (!iswi_slab_name_parse(text, &name))
		return refuse(store, text, "not a name of ours", error);
	/* The slab was being made, so nobody has used it. */
	if (name.kind == ISWI_SLAB_FILE_NEW) {
		if (unlinkat(store->dir.fd, text, 0) == 0)
			return 0;
		return refuse(store, text, "being made", error);
	}
	err = take_slab(store, text, &name, &store->slabs[*count], error);
	if (err == 0 && store->slabs[*count].state != ISWI_SLAB_NONE)
		++*count;
	return err;
}

/* A pool that has become smaller keeps what is lent, and nothing else beyond its size. */
static void shrink(isw_store *store, uint32_t count)
{
	for (uint32_t i = 0; i < store->slabs_size && count > store->config.slabs_max; i++) {
		struct iswi_store_slab *slab = &store->slabs[i];

		if (slab->state != ISWI_SLAB_FREE && slab->state != ISWI_SLAB_DIRTY)
			continue;
		iswi_slab_dir_unlink(&store->dir, &slab->name);
		iswi_slab_mem_free(&slab->mem);
		*slab = (struct iswi_store_slab){.state = ISWI_SLAB_NONE};
		count--;
	}
}

int iswi_store_restore(isw_store *store, struct isw_error *error)
{
	struct found found = {0};
	uint32_t count = 0;
	int err = 0;

	if (store->dir.fd >= 0) {
		err = list(store->dir.fd, &found);
		if (err != 0)
			iswi_error(error, err, "the directory of slabs cannot be read: %s",
				   strerror(-err));
		else
			err = take_counter(store, &found, error);
		if (err != 0)
			goto out_found;
	}
	store->slabs_size = ISWI_MAX(store->config.slabs_max, found.count);
	store->slabs = calloc(store->slabs_size, sizeof(*store->slabs));
	if (store->slabs == NULL) {
		store->slabs_size = 0;
		err = iswi_error(error, -ENOMEM, "no memory for the store's tables");
	}
	for (uint32_t i = 0; i < found.count && err == 0; i++)
		err = take_file(store, found.texts[i], &count, error);
	if (err == 0)
		shrink(store, count);
out_found:
	free_found(&found);
	return err;
}

int isw_store_note(isw_store *store, uint32_t index, struct isw_error *note_out)
{
	if (index >= ISWI_MIN(store->note_count, ISWI_STORE_NOTES_MAX))
		return -ENOENT;
	*note_out = store->notes[index];
	return 0;
}

/* store->lock held. */
static void put_into_lease(struct iswi_lease *lease, uint32_t number)
{
	struct iswi_store_slab *slab = &lease->store->slabs[number];
	struct iswi_slot *slot = &lease->slots[slab->name.slot];
	uint64_t word = atomic_load(&slot->word);

	/* Two slabs in one slot: one of the names is wrong, and it is unknown which. */
	if (word != ISWI_SLOT_EMPTY) {
		if ((word & ISWI_SLOT_STATE_MASK) != ISWI_SLOT_EMPTY)
			iswi_slot_empty(lease, slot);
		iswi_slab_retire(lease->store, slab);
		return;
	}
	slab->state = ISWI_SLAB_MAPPED;
	slot->slab = number;
	slot->tag = slab->name.tag;
	slot->memory = slab->mem.base;
	atomic_store(&slot->word,
		     (slab->name.generation << ISWI_SLOT_STATE_BITS) | (uint64_t)ISWI_SLOT_MAPPED);
	lease->slots_mapped++;
	lease->slot_next = (slab->name.slot + 1) % lease->slots_max;
}

static bool is_orphan_of(const struct iswi_store_slab *slab, const struct iswi_lease *lease)
{
	return slab->state == ISWI_SLAB_ORPHAN && slab->name.lease == lease->id &&
	       slab->name.slot < lease->slots_max;
}

int isw_store_lease_restore(isw_store *store, uint64_t id, uint32_t slots_max, uint64_t epoch)
{
	struct iswi_lease *lease;
	int err = 0;

	if (slots_max == 0 || slots_max > ISWI_STORE_SLOTS_MAX || id == 0 || epoch == 0)
		return -EINVAL;
	lease = iswi_lease_alloc(store, slots_max);
	if (lease == NULL)
		return -ENOMEM;
	lease->id = id;
	lease->epoch = epoch;
	pthread_mutex_lock(&store->lock);
	if (id > store->dir.reserved)
		err = -EINVAL;
	else if (iswi_lease_find(store, id) != NULL)
		err = -EEXIST;
	else if (!iswi_lease_insert(store, lease))
		err = -ENOSPC;
	for (uint32_t i = 0; i < store->slabs_size && err == 0; i++)
		if (is_orphan_of(&store->slabs[i], lease))
			put_into_lease(lease, i);
	pthread_mutex_unlock(&store->lock);
	if (err != 0)
		iswi_lease_free(lease);
	return err;
}

void isw_store_restored(isw_store *store)
{
	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->slabs_size; i++)
		if (store->slabs[i].state == ISWI_SLAB_ORPHAN)
			iswi_slab_retire(store, &store->slabs[i]);
	pthread_mutex_unlock(&store->lock);
}

int isw_store_lease_slot(isw_store *store, uint64_t id, uint32_t number,
			 struct isw_slot_info *info_out)
{
	const struct iswi_lease *lease;
	int err = -ENOENT;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	for (uint32_t i = number; lease != NULL && i < lease->slots_max && err != 0; i++) {
		uint64_t word = atomic_load(&lease->slots[i].word);

		if ((word & ISWI_SLOT_STATE_MASK) == ISWI_SLOT_EMPTY)
			continue;
		info_out->generation = word >> ISWI_SLOT_STATE_BITS;
		info_out->slot = i;
		info_out->tag = lease->slots[i].tag;
		err = 0;
	}
	pthread_mutex_unlock(&store->lock);
	return err;
}
