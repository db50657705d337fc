// SPDX-License-Identifier: Apache-2.0
/* The store as a whole: made, asked for its counters, destroyed. It alone names its transports. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "store/rdma.h"
#include "store/store.h"

/*
 * Connections with threads of their own. A worker's additional system call costs a lone reader a
 * few hundredths of its pages; workers save a few connections a tenth of their processor time, many
 * more than that (docs/policies.md).
 */
#define LONE_THREADS_MAX 8u

/* TCP is the NBD server itself (export.c). */
static const struct iswi_store_transport *const transports[] = {&iswi_store_rdma, NULL};

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
		.lone_threads_max = LONE_THREADS_MAX,
	};

	return iswi_nbd_server_create(&config, &store->server, error);
}

static int create_parts(isw_store *store, struct isw_error *error)
{
	int err = 0;

	for (uint32_t i = 0; transports[i] != NULL && err == 0; i++)
		err = transports[i]->create(store, &store->parts[transports[i]->kind]);
	return err == 0 ? 0 : iswi_error(error, err, "no memory for the store's transports");
}

static void destroy_parts(isw_store *store)
{
	for (uint32_t i = 0; transports[i] != NULL; i++)
		if (store->parts[transports[i]->kind] != NULL)
			transports[i]->destroy(store);
}

/* Memory that lies in files stays there. */
static void free_tables(isw_store *store)
{
	for (uint32_t i = 0; i < store->slabs_size; i++)
		if (store->slabs[i].mem.base != NULL)
			iswi_slab_mem_free(&store->slabs[i].mem);
	iswi_slab_dir_close(&store->dir);
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
	store->config.slab_dir = NULL; /* the caller's, and no longer needed */
	store->dir.fd = -1;
	store->transports = transports;
	store->clock = &iswi_clock_monotonic;
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
	err = create_parts(store, error);
	if (err == 0)
		err = create_server(store, error);
	if (err != 0)
		goto err_sync;
	*store_out = store;
	return 0;

err_sync:
	destroy_parts(store);
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
	/* From here on this is the only thread in the store. */
	iswi_nbd_server_destroy(store->server);
	for (uint32_t i = 0; i < store->config.leases_max; i++) {
		if (store->leases[i] == NULL)
			continue;
		iswi_lease_end(store->leases[i], false);
		iswi_lease_free(store->leases[i]);
	}
	destroy_parts(store);
	pthread_mutex_destroy(&store->lock);
	pthread_cond_destroy(&store->changed);
	free_tables(store);
}

int isw_store_listen(isw_store *store, const char *host, uint16_t port, uint16_t *port_out,
		     struct isw_error *error)
{
	return iswi_nbd_server_listen_tcp(store->server, host, port, port_out, error);
}

static void count_slab(const struct iswi_store_slab *slab, struct isw_store_stats *stats_out)
{
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
	default: /* has no memory, or not for long */
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
	for (uint32_t i = 0; i < store->config.leases_max; i++)
		if (store->leases[i] != NULL && !store->leases[i]->dying)
			stats_out->leases++;
	for (uint32_t i = 0; transports[i] != NULL; i++)
		transports[i]->stats(store, stats_out);
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
