/* SPDX-License-Identifier: Apache-2.0 */
/* RDMA connections of a device: offered, told to the donor by Python, and accepted by a remote. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

#define RDMA_DEPTH 256u

struct isw_rdma_offer {
	struct isw_engine *engine;
	struct iswi_engine_rdma *device;
	struct iswi_verbs_choice choice;
	struct iswi_rdma_places *places;
	uint32_t count;
	struct iswi_queue *queues[ISWI_REMOTE_QUEUES_MAX];
	struct isw_rdma_end ends[ISWI_REMOTE_QUEUES_MAX];
};

/*
 * Opened when a donor is reached through the device, which registers the staging buffers, and kept
 * while one is: a device that is not used must be free to go.
 */
static int join_device(struct isw_engine *e, const char *device, struct iswi_engine_rdma **out,
		       struct isw_error *error)
{
	struct iswi_engine_rdma *found = NULL, *room = NULL;
	int code = 0;

	pthread_mutex_lock(&e->rdma_lock);
	for (uint32_t i = 0; i < ISWI_RDMA_DOMAINS_MAX && !found; i++) {
		struct iswi_engine_rdma *one = &e->rdma[i];

		if (!one->domain)
			room = one;
		else if (!one->failed && !strcmp(one->device, device))
			found = one;
	}
	if (!found && !room) {
		code = iswi_error(error, -ENOSPC, "the device uses %u RDMA devices already",
				  ISWI_RDMA_DOMAINS_MAX);
	} else if (!found) {
		found = room;
		code = iswi_rdma_domain_open(e->verbs, device, e->staging,
					     (uint64_t)e->config.staging_pages * ISW_PAGE_BYTES,
					     &found->domain, error);
		memcpy(found->device, device, sizeof(found->device));
		found->failed = false;
		atomic_store(&found->leaving, false);
	}
	if (!code) {
		found->users++;
		*out = found;
	}
	pthread_mutex_unlock(&e->rdma_lock);
	return code;
}

void iswi_rdma_leave(struct isw_engine *e, struct iswi_engine_rdma *device)
{
	if (!device)
		return;
	pthread_mutex_lock(&e->rdma_lock);
	if (!--device->users) {
		iswi_rdma_domain_close(device->domain);
		device->domain = NULL;
	}
	pthread_mutex_unlock(&e->rdma_lock);
}

/* It may have been removed, and be there again under the same name. */
static void device_failed(struct isw_engine *e, struct iswi_engine_rdma *device)
{
	pthread_mutex_lock(&e->rdma_lock);
	device->failed = true;
	pthread_mutex_unlock(&e->rdma_lock);
}

/* How many are since just now. */
static uint32_t find_leaving(struct isw_engine *e)
{
	uint32_t count = 0;

	pthread_mutex_lock(&e->rdma_lock);
	for (uint32_t i = 0; i < ISWI_RDMA_DOMAINS_MAX; i++) {
		struct iswi_engine_rdma *one = &e->rdma[i];

		if (!one->domain || atomic_load(&one->leaving) ||
		    !iswi_rdma_domain_is_leaving(one->domain))
			continue;
		atomic_store(&one->leaving, true);
		one->failed = true;
		count++;
	}
	pthread_mutex_unlock(&e->rdma_lock);
	return count;
}

uint32_t isw_rdma_let_go(isw_engine *e)
{
	uint32_t count = find_leaving(e);

	for (uint32_t i = 0; i < e->config.remotes_max; i++) {
		struct iswi_remote *r = &e->remotes[i];

		/* Against a reconnect, which begins under it; never held while one is going on. */
		pthread_mutex_lock(&e->control);
		if (atomic_load(&r->state) == ISWI_REMOTE_UP && r->device &&
		    atomic_load(&r->device->leaving))
			iswi_remote_fence(e, i, -ENODEV);
		pthread_mutex_unlock(&e->control);
	}
	return count;
}

void iswi_rdma_init(struct isw_engine *e)
{
	e->verbs = &iswi_verbs_system;
	pthread_mutex_init(&e->rdma_lock, NULL);
}

void iswi_rdma_fini(struct isw_engine *e)
{
	for (uint32_t i = 0; i < ISWI_RDMA_DOMAINS_MAX; i++)
		iswi_rdma_domain_close(e->rdma[i].domain);
}

void iswi_engine_verbs_set(struct isw_engine *e, const struct iswi_verbs *verbs)
{
	e->verbs = verbs;
}

int isw_rdma_offer_make(isw_engine *e, const char *host, uint32_t queues, uint32_t slots,
			isw_rdma_offer **offer_out, struct isw_error *error)
{
	struct iswi_rdma_config config = {
		.slab_bytes = e->config.slab_bytes,
		.depth = RDMA_DEPTH,
		.request_bytes_max = e->config.request_bytes_max,
		.thread_name = "isw-rdma",
	};
	struct isw_rdma_offer *offer;
	int code;

	if (!queues || queues > ISWI_REMOTE_QUEUES_MAX || !slots)
		return iswi_error(error, -EINVAL, "a donor takes 1 to %u connections, not %u",
				  ISWI_REMOTE_QUEUES_MAX, queues);
	offer = calloc(1, sizeof(*offer));
	if (!offer)
		return iswi_error(error, -ENOMEM, "no memory for RDMA");
	offer->engine = e;
	code = iswi_verbs_choose(e->verbs, host, &offer->choice, error);
	if (!code)
		code = join_device(e, offer->choice.device, &offer->device, error);
	if (!code && iswi_rdma_places_make(slots, &offer->places))
		code = iswi_error(error, -ENOMEM, "no memory for RDMA");
	config.domain = offer->device ? offer->device->domain : NULL;
	config.places = offer->places;
	config.choice = &offer->choice;
	while (!code && offer->count < queues) {
		code = iswi_rdma_make(&config, &offer->queues[offer->count],
				      &offer->ends[offer->count], error);
		if (!code)
			offer->count++;
		else if (code != -ENOMEM)
			device_failed(e, offer->device);
	}
	if (code)
		isw_rdma_offer_destroy(offer);
	else
		*offer_out = offer;
	return code;
}

void isw_rdma_offer_end(const isw_rdma_offer *offer, uint32_t queue, struct isw_rdma_end *end_out)
{
	*end_out = offer->ends[queue];
}

/* When it returns, none of them says any more that it is down. */
static void destroy_queues(isw_rdma_offer *offer)
{
	for (; offer->count; offer->count--)
		offer->queues[offer->count - 1]->ops->destroy(offer->queues[offer->count - 1]);
}

void isw_rdma_offer_destroy(isw_rdma_offer *offer)
{
	if (!offer)
		return;
	destroy_queues(offer);
	iswi_rdma_places_free(offer->places);
	iswi_rdma_leave(offer->engine, offer->device);
	free(offer);
}

int iswi_rdma_offer_accept(const struct isw_remote_config *config, struct iswi_remote *r,
			   struct iswi_queue **queues_out, uint32_t *count_out,
			   struct isw_error *error)
{
	struct isw_rdma_offer *offer = config->rdma;
	int code = 0;

	if (offer->engine != r->engine || offer->count != config->queues)
		return iswi_error(error, -EINVAL, "an RDMA offer of %u connections, not %u",
				  offer->count, config->queues);
	for (uint32_t i = 0; i < offer->count && !code; i++)
		code = iswi_rdma_connect(offer->queues[i], &config->rdma_peers[i],
					 &config->rdma_probe, config->connect_ms_max,
					 config->request_ms_max, &r->events, error);
	if (code) {
		destroy_queues(offer); /* now: the remote's number may soon be another's */
		return code;
	}
	*count_out = offer->count;
	memcpy(queues_out, offer->queues, offer->count * sizeof(offer->queues[0]));
	offer->count = 0;
	r->places = offer->places;
	offer->places = NULL;
	r->device = offer->device;
	offer->device = NULL;
	atomic_store_explicit(&r->rdma, true, memory_order_relaxed);
	return 0;
}

int isw_remote_slot_key(isw_engine *e, uint32_t remote, uint32_t slot,
			const struct isw_rdma_key *key)
{
	int code = -EINVAL, state;

	if (remote >= e->config.remotes_max)
		return code;
	pthread_mutex_lock(&e->control); /* against a reconnect, which begins under it */
	state = atomic_load(&e->remotes[remote].state);
	if ((state != ISWI_REMOTE_UP && state != ISWI_REMOTE_DOWN) || !e->remotes[remote].places)
		code = -ENOTCONN;
	else
		code = iswi_rdma_places_set(e->remotes[remote].places, slot, key);
	pthread_mutex_unlock(&e->control);
	return code;
}
