/* SPDX-License-Identifier: Apache-2.0 */
/* An engine's life, its statistics, and its page tables on disk. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine.h"
#include "engine/ops/ops.h"
#include "engine/state/seal.h"
#include "transport/rdma.h"

static int check_config(const struct isw_engine_config *c, struct isw_error *error)
{
	if (!c->size_bytes || c->size_bytes % ISW_PAGE_BYTES)
		return iswi_error(error, -EINVAL, "device size %llu is not a multiple of %u",
				  (unsigned long long)c->size_bytes, ISW_PAGE_BYTES);
	if (c->far_bytes % ISW_PAGE_BYTES || c->far_bytes >= c->size_bytes)
		return iswi_error(error, -EINVAL,
				  "far_bytes must be pages, and less than the size");
	if (!c->slab_bytes || c->slab_bytes % ISW_PAGE_BYTES)
		return iswi_error(error, -EINVAL, "slab size %llu is not a multiple of %u",
				  (unsigned long long)c->slab_bytes, ISW_PAGE_BYTES);
	if (c->size_bytes / c->slab_bytes > 1u << 20)
		return iswi_error(error, -EINVAL, "more than a million slabs; use larger ones");
	if (!c->request_bytes_max || c->request_bytes_max % ISW_PAGE_BYTES ||
	    c->request_bytes_max > 32u << 20)
		return iswi_error(error, -EINVAL,
				  "request_bytes_max must be pages, 32 MiB at most");
	if (!c->requests_max || !c->remotes_max || c->staging_pages < 16)
		return iswi_error(error, -EINVAL,
				  "requests_max and remotes_max must not be 0, staging_pages at "
				  "least 16");
	if (c->backup_write_bytes_max < ISW_PAGE_BYTES)
		return iswi_error(error, -EINVAL, "backup_write_bytes_max is less than a page");
	return 0;
}

/* What is made and freed with an engine. */
struct whole {
	struct isw_engine engine; /* first: it is freed by its address */
	struct iswi_backup backup;
	struct iswi_rdma_domains rdma;
};

int iswi_engine_make(const struct isw_engine_config *config, struct isw_engine **engine_out,
		     struct isw_error *error)
{
	struct whole *whole;
	struct isw_engine *e;
	int code = check_config(config, error);

	if (code)
		return code;
	whole = calloc(1, sizeof(*whole));
	if (!whole)
		return iswi_error(error, -ENOMEM, "no memory for the device");
	e = &whole->engine;
	e->backup = &whole->backup;
	e->rdma = &whole->rdma;
	e->config = *config;
	e->clock = &iswi_clock_monotonic;
	e->pages = config->size_bytes / ISW_PAGE_BYTES;
	e->slab_pages = config->slab_bytes / ISW_PAGE_BYTES;
	e->slabs_count = (uint32_t)((e->pages + e->slab_pages - 1) / e->slab_pages);
	e->has_backup = !(config->flags & ISW_ENGINE_NO_BACKUP);
	/* Without hedging a disk that hangs would hold up what a donor has. */
	if (!iswi_hedges(e))
		e->config.flags &= ~(uint32_t)ISW_ENGINE_QUICKER;
	e->standby = config->flags & ISW_ENGINE_STANDBY;
	e->state_lock_fd = -1;
	pthread_mutex_init(&e->control, NULL);
	iswi_backup_init(e->backup);
	e->go_on = iswi_write_kick;
	code = iswi_events_init(&e->events);
	if (code) {
		iswi_error(error, code, "cannot create an eventfd");
		goto err_free;
	}
	code = iswi_seal_create(e, error);
	if (code)
		goto err_seal;
	code = iswi_memory_create(e, sizeof(struct iswi_remote), error);
	if (!code && !e->standby)
		code = iswi_seal_begin(e, error);
	if (code)
		goto err_memory;
	iswi_remote_init(e);
	iswi_rdma_domains_init(e->rdma);
	*engine_out = e;
	return 0;

err_memory:
	iswi_memory_destroy(e);
err_seal:
	iswi_seal_destroy(e);
	iswi_events_fini(&e->events);
err_free:
	free(e);
	return code;
}

int isw_engine_create(const struct isw_engine_config *config, const char *backup_path,
		      isw_engine **engine_out, struct isw_error *error)
{
	struct isw_engine *e;
	int code;

	if (!config->backup_writers || !config->backup_readers ||
	    config->backup_writers + config->backup_readers > ISWI_BACKUP_THREADS_MAX)
		return iswi_error(
			error, -EINVAL,
			"backup_writers and backup_readers: at least 1 each, 16 together");
	if (!(config->flags & ISW_ENGINE_STANDBY) &&
	    !backup_path != !!(config->flags & ISW_ENGINE_NO_BACKUP))
		return iswi_error(error, -EINVAL, "either a backup path or ISW_ENGINE_NO_BACKUP");
	code = iswi_engine_make(config, &e, error);
	if (code)
		return code;
	if (e->has_backup && !e->standby) {
		code = iswi_backup_file_open(backup_path, config->size_bytes, false,
					     &e->backup->ctx, error);
		if (code)
			goto err_engine;
		e->backup->ops = &iswi_backup_file_ops;
	}
	if (e->has_backup) {
		code = iswi_backup_start(e, error);
		if (code)
			goto err_engine;
	}
	if (!e->standby)
		iswi_arena_ready(e);
	*engine_out = e;
	return 0;

err_engine:
	isw_engine_destroy(e);
	return code;
}

int isw_engine_take_over(isw_engine *e, const char *backup_path, struct isw_error *error)
{
	void *backup = NULL;
	int code;

	if (!e->standby)
		return iswi_error(error, -EINVAL, "only a standby takes over");
	if (!backup_path != !e->has_backup)
		return iswi_error(error, -EINVAL, "either a backup path or ISW_ENGINE_NO_BACKUP");
	/* Checked before any wait, and again when nobody else can change it. */
	code = iswi_arena_check(e, error);
	if (code)
		return code;
	code = iswi_arena_own(e, ISWI_OWNER_WAIT_MS, error);
	if (code)
		return code;
	if (e->has_backup)
		code = iswi_backup_file_open(backup_path, e->config.size_bytes, true, &backup,
					     error);
	if (code)
		goto err_disown;
	code = iswi_arena_check(e, error);
	if (code)
		goto err_backup;
	if (e->has_backup) {
		pthread_mutex_lock(&e->backup->lock); /* its threads wait already */
		e->backup->ops = &iswi_backup_file_ops;
		e->backup->ctx = backup;
		pthread_mutex_unlock(&e->backup->lock);
	}
	code = iswi_recover(e, error);
	if (!code)
		return 0;
	e->backup->ctx = NULL; /* nothing is queued */

err_backup:
	if (backup)
		iswi_backup_file_ops.destroy(backup);
err_disown:
	iswi_arena_disown(e);
	return code;
}

void isw_engine_destroy(isw_engine *e)
{
	if (!e)
		return;
	iswi_remote_stop_all(e);
	iswi_backup_stop(e);
	iswi_memory_destroy(e);
	iswi_seal_destroy(e);
	iswi_events_fini(&e->events);
	free(e);
}

int isw_engine_eventfd(isw_engine *e)
{
	return e->events.fd;
}

int isw_engine_events(isw_engine *e, struct isw_event *events_out, uint32_t max)
{
	return iswi_events_take(&e->events, events_out, max);
}

void isw_engine_report_use(isw_engine *e)
{
	atomic_store(&e->report_use, true);
}

int isw_engine_settle(isw_engine *e, uint32_t wait_ms_max)
{
	const struct timespec tick = {.tv_nsec = 5000000};
	uint32_t used, copies;

	/* A staged page is one that the backup lacks, or that is still being sent (R1). */
	for (uint32_t waited_ms = 0;; waited_ms += 5) {
		iswi_staging_count(e, &used, &copies);
		if (used == copies)
			break;
		if (waited_ms >= wait_ms_max)
			return -ETIMEDOUT;
		nanosleep(&tick, NULL);
	}
	return e->has_backup ? e->backup->ops->sync(e->backup->ctx) : 0;
}

void isw_engine_stats(isw_engine *e, struct isw_engine_stats *out)
{
	struct iswi_counters *c = &e->count;
	uint32_t used, copies;

	memset(out, 0, sizeof(*out));
#define COPY(name) out->name = iswi_counted(&c->name);
	ISWI_COUNTERS(COPY)
#undef COPY
	out->requests_in_flight = iswi_counted(&c->in_flight);
	out->staging_pages = e->config.staging_pages;
	iswi_staging_count(e, &used, &copies);
	out->staging_pages_used = used;
	out->events_dropped = iswi_counted(&e->events.dropped);
	out->backup_expected_ns = iswi_speed_expected_ns(&e->backup->speed, 1);
	pthread_mutex_lock(&e->backup->lock);
	out->backup_failing = e->backup->ailing_count;
	pthread_mutex_unlock(&e->backup->lock);
	for (uint32_t i = 0; i < ISW_LATENCY_BUCKETS; i++) {
		out->read_latency[i] = iswi_counted(&e->read_latency.bucket[i]);
		out->waited_read_latency[i] = iswi_counted(&e->waited_read_latency.bucket[i]);
		out->read_requests_waited += out->waited_read_latency[i];
		out->write_latency[i] = iswi_counted(&e->write_latency.bucket[i]);
		out->remote_read_latency[i] = iswi_counted(&e->remote_read_latency.bucket[i]);
		out->remote_write_latency[i] = iswi_counted(&e->remote_write_latency.bucket[i]);
		out->backup_read_latency[i] = iswi_counted(&e->backup_read_latency.bucket[i]);
		out->backup_write_latency[i] = iswi_counted(&e->backup_write_latency.bucket[i]);
	}
}
