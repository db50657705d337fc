// SPDX-License-Identifier: Apache-2.0
/* The store itself and its slabs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "store/store.h"

static int check_config(const struct isw_store_config *config, struct isw_error *error)
{
	if (config->slab_bytes == 0 || config->slab_bytes % ISW_PAGE_BYTES != 0 ||
	    config->slab_bytes > INT64_MAX / ISWI_STORE_SLOTS_MAX)
		return iswi_error(error, -EINVAL,
				  "slab size %llu: it must be a multiple of %u bytes, and not 0",
				  (unsigned long long)config->slab_bytes, ISW_PAGE_BYTES);
	if (config->slabs_max == 0 || config->slabs_max > ISWI_STORE_SLABS_MAX)
		return iswi_error(error, -EINVAL,
				  "a store of %u slabs: 1 to %u are possible; choose the pool's "
				  "size or a larger slab accordingly",
				  config->slabs_max, ISWI_STORE_SLABS_MAX);
	if (config->leases_max == 0 || config->leases_max > ISWI_STORE_LEASES_MAX ||
	    config->connections_per_lease_max == 0)
		return iswi_error(error, -EINVAL,
				  "the store's limits on leases and connections must not be 0");
	return 0;
}

static int init_sync(isw_store *store)
{
	pthread_condattr_t attr;
	int err = pthread_condattr_init(&attr);

	if (err != 0)
		return -err;
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	err = pthread_cond_init(&store->changed, &attr);
	pthread_condattr_destroy(&attr);
	if (err != 0)
		return -err;
	err = pthread_mutex_init(&store->lock, NULL);
	if (err != 0)
		pthread_cond_destroy(&store->changed);
	return -err;
}

static int create_server(isw_store *store, struct isw_error *error)
{
	const struct iswi_nbd_server_config config = {
		.backend = &iswi_store_backend,
		.ctx = store,
		.connections_max = store->config.connections_max,
		.connections_per_host_max = store->config.connections_per_host_max,
		.handshake_ms_max = store->config.handshake_ms_max,
		.send_ms_max = store->config.send_ms_max,
	};

	return iswi_nbd_server_create(&config, &store->server, error);
}

/* Memory that lies in files stays there. */
static void free_tables(isw_store *store)
{
	for (uint32_t i = 0; i < store->slabs_size; i++)
		if (store->slabs[i].mem.base != NULL)
			iswi_slab_mem_free(&store->slabs[i].mem);
	iswi_slab_dir_close(&store->dir);
	pthread_mutex_destroy(&store->devices_lock);
	free(store->leases);
	free(store->slabs);
	free(store);
}

int isw_store_create(const struct isw_store_config *config, isw_store **store_out,
		     struct isw_error *error)
{
	isw_store *store;
	int err = check_config(config, error);

	if (err != 0)
		return err;
	store = calloc(1, sizeof(*store));
	if (store == NULL)
		return iswi_error(error, -ENOMEM, "no memory for the store");
	store->config = *config;
	store->config.slab_dir = NULL; /* the caller's, and not needed any more */
	store->dir.fd = -1;
	store->verbs = &iswi_verbs_system;
	pthread_mutex_init(&store->devices_lock, NULL);
	store->leases = calloc(config->leases_max, sizeof(struct iswi_lease *));
	if (store->leases == NULL) {
		err = iswi_error(error, -ENOMEM, "no memory for the store's tables");
		goto err_tables;
	}
	if (config->slab_dir != NULL)
		err = iswi_slab_dir_open(&store->dir, config->slab_dir, error);
	if (err == 0)
		err = iswi_store_restore(store, error);
	if (err != 0)
		goto err_tables;
	err = init_sync(store);
	if (err != 0) {
		iswi_error(error, err, "the store could not be set up: %s", strerror(-err));
		goto err_tables;
	}
	err = create_server(store, error);
	if (err != 0)
		goto err_sync;
	*store_out = store;
	return 0;

err_sync:
	pthread_mutex_destroy(&store->lock);
	pthread_cond_destroy(&store->changed);
err_tables:
	free_tables(store);
	return err;
}

void isw_store_destroy(isw_store *store)
{
	if (store == NULL)
		return;
	/* After this no thread but ours is left in here. */
	iswi_nbd_server_destroy(store->server);
	for (uint32_t i = 0; i < store->config.leases_max; i++) {
		if (store->leases[i] != NULL)
			iswi_lease_rdma_end(store->leases[i]);
		free(store->leases[i]);
	}
	for (uint32_t i = 0; i < store->slabs_size; i++)
		iswi_slab_ahead_end(store, &store->slabs[i]);
	pthread_mutex_destroy(&store->lock);
	pthread_cond_destroy(&store->changed);
	free_tables(store);
}

int isw_store_listen(isw_store *store, const char *host, uint16_t port, uint16_t *port_out,
		     struct isw_error *error)
{
	return iswi_nbd_server_listen_tcp(store->server, host, port, port_out, error);
}

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

void iswi_slab_retire(isw_store *store, struct iswi_store_slab *slab)
{
	/* A file that keeps its old name would be found by a successor as what it is no more. */
	if (iswi_slab_dir_become(&store->dir, &slab->name, ISWI_SLAB_FILE_DIRTY) != 0)
		iswi_slab_dir_unlink(&store->dir, &slab->name);
	slab->state = ISWI_SLAB_DIRTY;
	slab->lent = false;
}

/* Claims a slab in one state by putting it into another. NULL: there is none. */
static struct iswi_store_slab *claim(isw_store *store, enum iswi_slab_state from,
				     enum iswi_slab_state to)
{
	struct iswi_store_slab *found = NULL;

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->slabs_size && found == NULL; i++)
		if (store->slabs[i].state == from &&
		    !(to == ISWI_SLAB_FREEING &&
		      (store->slabs[i].pinning || store->slabs[i].registering)))
			found = &store->slabs[i];
	if (found != NULL)
		found->state = to;
	pthread_mutex_unlock(&store->lock);
	return found;
}

/* As claim; the pool may have found more slabs than it may make. */
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
	/* A dirty one first: the host that waits for its memory need not wait for the zeroing. */
	struct iswi_store_slab *slab = claim(store, ISWI_SLAB_DIRTY, ISWI_SLAB_FREEING);

	if (slab == NULL)
		slab = claim(store, ISWI_SLAB_FREE, ISWI_SLAB_FREEING);
	if (slab == NULL)
		return -ENOENT;
	iswi_slab_dir_unlink(&store->dir, &slab->name);
	iswi_slab_ahead_end(store, slab);
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
	if (slab != NULL)
		slab->pinning = true;
	pthread_mutex_unlock(&store->lock);
	if (slab == NULL)
		return -ENOENT;
	pinned = iswi_slab_mem_pin(&slab->mem);
	pthread_mutex_lock(&store->lock);
	slab->pinning = false;
	slab->mem.pinned = pinned;
	slab->pin_failed = !pinned;
	pthread_mutex_unlock(&store->lock);
	return 0;
}

static void count_slab(const struct iswi_store_slab *slab, struct isw_store_stats *stats_out)
{
	stats_out->rdma_ahead += slab->ahead != NULL;
	switch (slab->state) {
	case ISWI_SLAB_FREE:
		stats_out->slabs_free++;
		break;
	case ISWI_SLAB_MAPPED:
		stats_out->slabs_mapped++;
		break;
	case ISWI_SLAB_DIRTY:
	case ISWI_SLAB_ZEROING:
	case ISWI_SLAB_ORPHAN:
		stats_out->slabs_dirty++;
		break;
	default: /* its memory is not there yet, or no more */
		return;
	}
	if (!slab->mem.pinned)
		stats_out->slabs_unpinned++;
}

void isw_store_stats(isw_store *store, struct isw_store_stats *stats_out)
{
	struct iswi_nbd_server_stats served;

	memset(stats_out, 0, sizeof(*stats_out));
	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->slabs_size; i++)
		count_slab(&store->slabs[i], stats_out);
	for (uint32_t i = 0; i < store->config.leases_max; i++) {
		if (store->leases[i] == NULL || store->leases[i]->dying)
			continue;
		stats_out->leases++;
		stats_out->rdma_connections += atomic_load_explicit(
			&store->leases[i]->rdma_connections, memory_order_relaxed);
	}
	stats_out->rdma_regions = iswi_counted(&store->rdma_regions);
	stats_out->rdma_failures = iswi_counted(&store->rdma_failures);
	pthread_mutex_unlock(&store->lock);
	iswi_nbd_server_stats(store->server, &served);
	stats_out->connections = served.connections;
	stats_out->connections_refused = served.connections_refused;
	stats_out->read_requests = served.read_requests;
	stats_out->write_requests = served.write_requests;
	stats_out->read_bytes = served.read_bytes;
	stats_out->write_bytes = served.write_bytes;
	stats_out->request_errors = served.request_errors;
	stats_out->protocol_errors = served.protocol_errors;
}
