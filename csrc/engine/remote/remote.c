/* SPDX-License-Identifier: Apache-2.0 */
/* Remotes: the connections to each donor, from their making to their end. */
#include <errno.h>
#include <time.h>

#include "engine/remote/remote.h"
#include "engine/state/arena.h"

#define RETIRE_WAIT_MS 10000u

/*
 * state before the places' words; map and resume do it the other way round. So a place mapped while
 * its remote goes down is suspended by one of the two.
 */
void iswi_remote_fence(struct isw_engine *e, uint32_t remote, int error)
{
	struct iswi_remote *r = &e->remotes[remote];
	int up = ISWI_REMOTE_UP;

	atomic_fetch_add(&r->fencing, 1);
	if (!atomic_compare_exchange_strong(&r->state, &up, ISWI_REMOTE_DOWN)) {
		atomic_fetch_sub(&r->fencing, 1);
		return;
	}
	iswi_places_suspend(e, remote);
	for (uint32_t i = 0; i < r->queues_count; i++)
		r->queues[i]->ops->shutdown(r->queues[i]);
	if (r->witness)
		r->witness->ops->shutdown(r->witness);
	iswi_events_put(&e->events, &(struct isw_event){
					    .kind = ISW_EVENT_REMOTE_DOWN,
					    .code = error,
					    .remote = remote,
				    });
	atomic_fetch_sub(&r->fencing, 1);
}

/* On a queue's own thread, before the queue ends its transfers. */
static void queue_down(void *ctx, int error)
{
	struct iswi_remote *r = ctx;

	atomic_store(&r->broken, true);
	iswi_remote_fence(r->engine, (uint32_t)(r - r->engine->remotes), error);
}

void iswi_remote_init(struct isw_engine *e)
{
	for (uint32_t i = 0; i < e->config.remotes_max; i++) {
		e->remotes[i].engine = e;
		e->remotes[i].events = (struct iswi_queue_events){queue_down, &e->remotes[i]};
	}
}

static bool remote_in_use(struct isw_engine *e, uint32_t remote, bool only_transfers)
{
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++) {
		struct iswi_place *p = iswi_place(e, i / 2, i % 2);

		if (iswi_place_remote(p) == remote &&
		    (!only_transfers || atomic_load(&p->in_flight)))
			return true;
	}
	return false;
}

/* Forgets the donor that had this number. */
static void forget(struct iswi_remote *r)
{
	atomic_store_explicit(&r->read_tail_ns, 0, memory_order_relaxed);
	iswi_speed_forget(&r->speed);
	atomic_store_explicit(&r->errors, 0, memory_order_relaxed);
	for (uint32_t i = 0; i < ISW_TRANSPORTS; i++) {
		atomic_store_explicit(&r->read_pages[i], 0, memory_order_relaxed);
		atomic_store_explicit(&r->write_pages[i], 0, memory_order_relaxed);
	}
}

int iswi_remote_reserve(struct isw_engine *e, uint32_t *remote)
{
	uint32_t first = 0, end = e->config.remotes_max;
	int wanted = ISWI_REMOTE_UNUSED, code = -ENOSPC;

	if (*remote != ISW_NO_REMOTE) {
		if (*remote >= end)
			return -EINVAL;
		first = *remote;
		end = first + 1;
		wanted = ISWI_REMOTE_DOWN;
		code = -EBUSY;
	}
	pthread_mutex_lock(&e->control);
	if (e->standby)
		code = -EBUSY;
	for (uint32_t i = first; i < end && code && !e->standby; i++) {
		if (atomic_load(&e->remotes[i].state) != wanted)
			continue;
		atomic_store(&e->remotes[i].state, ISWI_REMOTE_CHANGING);
		if (wanted == ISWI_REMOTE_UNUSED) { /* it may become another donor */
			forget(&e->remotes[i]);
			iswi_record_write(e, i, NULL, 0);
		}
		*remote = i;
		code = 0;
	}
	pthread_mutex_unlock(&e->control);
	return code;
}

static void destroy_queues(struct iswi_remote *r)
{
	for (uint32_t i = 0; i < r->queues_count; i++)
		r->queues[i]->ops->destroy(r->queues[i]);
	r->queues_count = 0;
	if (r->witness)
		r->witness->ops->destroy(r->witness);
	r->witness = NULL;
	atomic_store_explicit(&r->transport, ISW_TRANSPORT_TCP, memory_order_relaxed);
}

int iswi_remote_retire(struct isw_engine *e, uint32_t remote)
{
	struct iswi_remote *r = &e->remotes[remote];
	const struct timespec tick = {.tv_nsec = 1000000};
	uint32_t waited_ms = 0;

	/* Transfers of a queue that is down end by themselves; stragglers are inside submit. */
	while (atomic_load(&r->fencing) || remote_in_use(e, remote, true)) {
		if (waited_ms++ == RETIRE_WAIT_MS)
			return -ETIMEDOUT;
		nanosleep(&tick, NULL);
	}
	destroy_queues(r);
	atomic_store(&r->broken, false);
	return 0;
}

void iswi_remote_set(struct isw_engine *e, uint32_t remote, struct iswi_queue **queues,
		     uint32_t count, enum iswi_remote_state idle_state)
{
	struct iswi_remote *r = &e->remotes[remote];

	if (!count) {
		atomic_store(&r->state, idle_state);
		return;
	}
	for (uint32_t i = 0; i < count; i++)
		r->queues[i] = queues[i];
	r->queues_count = count;
	atomic_store(&r->state, ISWI_REMOTE_UP);
	/* A queue that broke before the state was UP could not fence. */
	if (atomic_load(&r->broken))
		iswi_remote_fence(e, remote, -ECONNRESET);
}

static int connect_queues(struct isw_engine *e, uint32_t remote,
			  const struct isw_remote_config *config, struct isw_error *error)
{
	struct iswi_remote *r = &e->remotes[remote];
	const struct iswi_transport_ops *transport = iswi_transport_for(config);
	struct iswi_queue *queues[ISWI_REMOTE_QUEUES_MAX];
	uint32_t count = 0, bytes_max = (uint32_t)ISWI_MIN(e->config.slab_bytes,
							   ISWI_STRIPE_PAGES * ISW_PAGE_BYTES);
	int code = 0;

	if (transport->witness)
		code = transport->witness->connect(e, config, 0, 0, &r->events, &r->witness, error);
	while (!code && count < config->queues) {
		code = transport->connect(e, config, count, bytes_max, &r->events, &queues[count],
					  error);
		if (!code)
			count++;
	}
	if (!code) {
		atomic_store_explicit(&r->transport, transport->kind, memory_order_relaxed);
		iswi_remote_set(e, remote, queues, count, ISWI_REMOTE_UP);
		return 0;
	}
	while (count--)
		queues[count]->ops->destroy(queues[count]);
	destroy_queues(r);
	atomic_store(&r->broken, false);
	return code;
}

static int check_remote(const struct isw_remote_config *config, struct isw_error *error)
{
	if (!config->queues || config->queues > ISWI_REMOTE_QUEUES_MAX)
		return iswi_error(error, -EINVAL, "a donor takes 1 to %u connections, not %u",
				  ISWI_REMOTE_QUEUES_MAX, config->queues);
	return 0;
}

int isw_remote_connect(isw_engine *e, const struct isw_remote_config *config, uint32_t *remote_out,
		       struct isw_error *error)
{
	uint32_t remote = ISW_NO_REMOTE;
	int code = check_remote(config, error);

	if (code)
		goto out;
	code = iswi_remote_reserve(e, &remote);
	if (code) {
		iswi_error(error, code, "the device has %u donors already, its limit",
			   e->config.remotes_max);
		goto out;
	}
	code = connect_queues(e, remote, config, error);
	if (code)
		iswi_remote_set(e, remote, NULL, 0, ISWI_REMOTE_UNUSED);
	else
		*remote_out = remote;
out:
	iswi_transport_release(config);
	return code;
}

int isw_remote_reconnect(isw_engine *e, uint32_t remote, const struct isw_remote_config *config,
			 struct isw_error *error)
{
	int code = check_remote(config, error);

	if (code)
		goto out;
	code = iswi_remote_reserve(e, &remote);
	if (code) {
		iswi_error(error, code, "donor %u is not down", remote);
		goto out;
	}
	code = iswi_remote_retire(e, remote);
	if (code)
		iswi_error(error, code, "requests to the donor's old connections do not end");
	else
		code = connect_queues(e, remote, config, error);
	if (code)
		iswi_remote_set(e, remote, NULL, 0, ISWI_REMOTE_DOWN);
out:
	iswi_transport_release(config);
	return code;
}

int isw_remote_slot_key(isw_engine *e, uint32_t remote, uint32_t slot,
			const struct isw_rdma_key *key)
{
	const struct iswi_remote *r;
	int code = -ENOTCONN, state;

	if (remote >= e->config.remotes_max)
		return -EINVAL;
	r = &e->remotes[remote];
	pthread_mutex_lock(&e->control); /* against a reconnect, which begins under it */
	state = atomic_load(&r->state);
	if ((state == ISWI_REMOTE_UP || state == ISWI_REMOTE_DOWN) && r->queues_count &&
	    r->queues[0]->ops->place)
		code = r->queues[0]->ops->place(r->queues[0], slot, key);
	pthread_mutex_unlock(&e->control);
	return code;
}

int isw_remote_shutdown(isw_engine *e, uint32_t remote)
{
	if (remote >= e->config.remotes_max)
		return -EINVAL;
	iswi_remote_fence(e, remote, -ESHUTDOWN);
	return 0;
}

int isw_remote_destroy(isw_engine *e, uint32_t remote)
{
	int code;

	if (remote >= e->config.remotes_max)
		return -EINVAL;
	pthread_mutex_lock(&e->control); /* against map */
	code = remote_in_use(e, remote, false) ? -EBUSY : 0;
	if (!code)
		iswi_remote_fence(e, remote, -ESHUTDOWN);
	pthread_mutex_unlock(&e->control);
	if (!code)
		code = iswi_remote_reserve(e, &remote);
	if (code)
		return code;
	code = iswi_remote_retire(e, remote);
	if (!code) {
		pthread_mutex_lock(&e->control);
		iswi_record_write(e, remote, NULL, 0);
		pthread_mutex_unlock(&e->control);
	}
	iswi_remote_set(e, remote, NULL, 0, code ? ISWI_REMOTE_DOWN : ISWI_REMOTE_UNUSED);
	return code;
}

int isw_remote_record_set(isw_engine *e, uint32_t remote, const void *data, uint32_t bytes)
{
	int code = 0, state;

	if (remote >= e->config.remotes_max)
		return -EINVAL;
	if (bytes > ISW_RECORD_BYTES_MAX)
		return -E2BIG;
	pthread_mutex_lock(&e->control);
	state = atomic_load(&e->remotes[remote].state);
	if (e->standby)
		code = -EBUSY;
	else if (state != ISWI_REMOTE_UP && state != ISWI_REMOTE_DOWN)
		code = -ENOTCONN;
	else
		iswi_record_write(e, remote, data, bytes);
	pthread_mutex_unlock(&e->control);
	return code;
}

int isw_remote_record(isw_engine *e, uint32_t remote, void *data_out)
{
	int code;

	if (remote >= e->config.remotes_max)
		return -EINVAL;
	pthread_mutex_lock(&e->control);
	code = e->standby ? -EBUSY : (int)iswi_record_read(e, remote, data_out);
	pthread_mutex_unlock(&e->control);
	return code;
}

int isw_engine_remotes(isw_engine *e, uint32_t max, struct isw_remote_info *remotes_out)
{
	uint32_t n;

	for (n = 0; n < e->config.remotes_max && n < max; n++) {
		struct iswi_remote *r = &e->remotes[n];
		int state = atomic_load(&r->state);

		remotes_out[n] = (struct isw_remote_info){
			.state = state == ISWI_REMOTE_CHANGING ? ISWI_REMOTE_DOWN : (uint32_t)state,
			.queues = atomic_load_explicit(&r->queues_count, memory_order_relaxed),
			.rdma_read_pages = iswi_counted(&r->read_pages[ISW_TRANSPORT_RDMA]),
			.rdma_write_pages = iswi_counted(&r->write_pages[ISW_TRANSPORT_RDMA]),
			.errors = iswi_counted(&r->errors),
			.read_tail_ns = iswi_counted(&r->read_tail_ns),
			.expected_ns = iswi_speed_expected_ns(&r->speed, 1),
			.rdma = atomic_load_explicit(&r->transport, memory_order_relaxed) ==
				ISW_TRANSPORT_RDMA,
		};
		for (uint32_t i = 0; i < ISW_TRANSPORTS; i++) {
			remotes_out[n].read_pages += iswi_counted(&r->read_pages[i]);
			remotes_out[n].write_pages += iswi_counted(&r->write_pages[i]);
		}
	}
	for (uint32_t i = 0; i < 2 * e->slabs_count && !e->standby; i++) {
		struct iswi_place *p = iswi_place(e, i / 2, i % 2);
		uint32_t remote = iswi_place_remote(p);

		if (remote < n)
			remotes_out[remote].in_flight += atomic_load(&p->in_flight);
	}
	return (int)n;
}

void iswi_remote_stop_all(struct isw_engine *e)
{
	const struct timespec tick = {.tv_nsec = 1000000};

	for (uint32_t i = 0; i < e->config.remotes_max && !e->standby; i++) {
		struct iswi_remote *r = &e->remotes[i];

		/* A queue that breaks just now shuts the others down: not while they are freed. */
		iswi_remote_fence(e, i, -ESHUTDOWN);
		/* A backup reader may be sending a copy. */
		while (atomic_load(&r->fencing) || remote_in_use(e, i, true))
			nanosleep(&tick, NULL);
		destroy_queues(r);
	}
}
