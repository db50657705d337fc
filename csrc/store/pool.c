// SPDX-License-Identifier: Apache-2.0
/* Slabs: made, pinned, zeroed, released. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/store.h"

int iswi_store_number(isw_store *store, uint64_t *last, uint64_t *number_out)
{
	int err = 0;

	/* A number is used only when the directory says that it may have been. */
	if (store->dir.fd >= 0 && *last >= store->dir.reserved)
		err = iswi_slab_dir_reserve(&store->dir);
	if (err == 0)
		*number_out = ++*last;
	return err;
}

void iswi_slab_end(isw_store *store, struct iswi_store_slab *slab)
{
	for (uint32_t i = 0; store->transports[i] != NULL; i++)
		store->transports[i]->slab_end(store, (uint32_t)(slab - store->slabs));
}

void iswi_slab_retire(isw_store *store, struct iswi_store_slab *slab)
{
	/* A successor would believe a file that keeps its old name. */
	if (iswi_slab_dir_become(&store->dir, &slab->name, ISWI_SLAB_FILE_DIRTY) != 0)
		iswi_slab_dir_unlink(&store->dir, &slab->name);
	slab->state = ISWI_SLAB_DIRTY;
}

/* Claims a slab in one state by putting it into another. NULL: there is none. */
static struct iswi_store_slab *claim(isw_store *store, enum iswi_slab_state from,
				     enum iswi_slab_state to)
{
	struct iswi_store_slab *found = NULL;

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->slabs_size && found == NULL; i++)
		if (store->slabs[i].state == from &&
		    !(to == ISWI_SLAB_FREEING && store->slabs[i].holds > 0))
			found = &store->slabs[i];
	if (found != NULL)
		found->state = to;
	pthread_mutex_unlock(&store->lock);
	return found;
}

/* As claim. There may be more slabs than slabs_max, because a predecessor left them. */
static struct iswi_store_slab *claim_place(isw_store *store, struct iswi_slab_name *name_out)
{
	struct iswi_store_slab *found = NULL;
	uint32_t used = 0;

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->slabs_size; i++) {
		if (store->slabs[i].state != ISWI_SLAB_NONE)
			used++;
		else if (found == NULL)
			found = &store->slabs[i];
	}
	*name_out = (struct iswi_slab_name){.kind = ISWI_SLAB_FILE_NEW};
	if (used >= store->config.slabs_max)
		found = NULL;
	if (found != NULL && store->dir.fd >= 0 &&
	    iswi_store_number(store, &store->serial_last, &name_out->serial) != 0)
		found = NULL;
	if (found != NULL)
		found->state = ISWI_SLAB_MAKING;
	pthread_mutex_unlock(&store->lock);
	return found;
}

static void put_back(isw_store *store, struct iswi_store_slab *slab, enum iswi_slab_state state)
{
	pthread_mutex_lock(&store->lock);
	slab->state = state;
	pthread_mutex_unlock(&store->lock);
}

/* Memory under that name, which then says that it is free. */
static int make_slab(isw_store *store, struct iswi_slab_name *name, struct iswi_slab_mem *mem_out)
{
	int fd = -1, err = 0;

	if (name->serial != 0)
		err = iswi_slab_dir_make(&store->dir, name, store->config.slab_bytes, &fd);
	if (err != 0)
		return err;
	err = iswi_slab_mem_make(mem_out, fd, store->config.slab_bytes);
	if (fd >= 0)
		close(fd);
	if (err != 0)
		goto err_file;
	err = iswi_slab_dir_become(&store->dir, name, ISWI_SLAB_FILE_FREE);
	if (err == 0)
		return 0;
	iswi_slab_mem_free(mem_out);
err_file:
	iswi_slab_dir_unlink(&store->dir, name);
	return err;
}

int isw_store_preallocate(isw_store *store, struct isw_error *error)
{
	struct iswi_slab_name name;
	struct iswi_store_slab *slab = claim_place(store, &name);
	struct iswi_slab_mem mem;
	int err;

	if (slab == NULL)
		return iswi_error(error, -ENOSPC, "the pool has all its %u slabs",
				  store->config.slabs_max);
	err = make_slab(store, &name, &mem);
	if (err != 0) {
		put_back(store, slab, ISWI_SLAB_NONE);
		return iswi_error(error, err, "no memory for one more slab of %llu bytes: %s",
				  (unsigned long long)store->config.slab_bytes, strerror(-err));
	}
	pthread_mutex_lock(&store->lock);
	slab->mem = mem;
	slab->name = name;
	slab->pin_failed = !mem.pinned;
	slab->state = ISWI_SLAB_FREE;
	pthread_mutex_unlock(&store->lock);
	return 0;
}

int isw_store_release_free(isw_store *store)
{
	/* A dirty slab first: the host gets its memory without waiting for the zeroing. */
	struct iswi_store_slab *slab = claim(store, ISWI_SLAB_DIRTY, ISWI_SLAB_FREEING);

	if (slab == NULL)
		slab = claim(store, ISWI_SLAB_FREE, ISWI_SLAB_FREEING);
	if (slab == NULL)
		return -ENOENT;
	iswi_slab_dir_unlink(&store->dir, &slab->name);
	iswi_slab_end(store, slab);
	iswi_slab_mem_free(&slab->mem);
	put_back(store, slab, ISWI_SLAB_NONE);
	return 0;
}

int isw_store_scrub(isw_store *store)
{
	struct iswi_store_slab *slab = claim(store, ISWI_SLAB_DIRTY, ISWI_SLAB_ZEROING);
	int err;

	if (slab == NULL)
		return -ENOENT;
	iswi_slab_mem_zero(&slab->mem);
	err = iswi_slab_dir_become(&store->dir, &slab->name, ISWI_SLAB_FILE_FREE);
	put_back(store, slab, err == 0 ? ISWI_SLAB_FREE : ISWI_SLAB_DIRTY);
	return err;
}

int isw_store_pin(isw_store *store)
{
	struct iswi_store_slab *slab = NULL;
	bool pinned;

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->slabs_size && slab == NULL; i++) {
		struct iswi_store_slab *one = &store->slabs[i];

		if (one->state != ISWI_SLAB_FREEING && one->mem.base != NULL && !one->mem.pinned &&
		    !one->pin_failed && !one->pinning)
			slab = one;
	}
	if (slab != NULL) {
		slab->pinning = true;
		slab->holds++;
	}
	pthread_mutex_unlock(&store->lock);
	if (slab == NULL)
		return -ENOENT;
	pinned = iswi_slab_mem_pin(&slab->mem);
	pthread_mutex_lock(&store->lock);
	slab->pinning = false;
	slab->holds--;
	slab->mem.pinned = pinned;
	slab->pin_failed = !pinned;
	pthread_mutex_unlock(&store->lock);
	return 0;
}
