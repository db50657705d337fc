/* SPDX-License-Identifier: Apache-2.0 */
/* RDMA: a queue's life. See rdma_internal.h first. */
#define _GNU_SOURCE 1
#include "transport/rdma.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "transport/rdma_internal.h"
#include "transport/tcp.h"

#define NS_PER_MS 1000000ull

/* ---------------------------------------------------------------------- any thread */

static struct iswi_rdma *rdma_of(struct iswi_tq *tq)
{
	return ISWI_CONTAINER(tq, struct iswi_rdma, tq);
}

/* 0, or why it must not go to the device. */
static int check(struct iswi_tq *tq, const struct iswi_xfer *xfer)
{
	const struct iswi_rdma *rdma = rdma_of(tq);
	uint64_t address;
	uint32_t key;

	if (xfer->length == 0 || xfer->length > rdma->bounce_bytes ||
	    xfer->length > rdma->slab_bytes - xfer->offset % rdma->slab_bytes)
		return -EINVAL;
	return iswi_rdma_locate(rdma, xfer, &address, &key) ? 0 : -ENXIO;
}

static bool queued(struct iswi_tq *tq)
{
	iswi_rdma_post_pending(rdma_of(tq));
	return false;
}

static void rdma_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	iswi_tq_submit(iswi_tq_of(queue), first, check, queued, NULL);
}

static void rdma_free(struct iswi_rdma *rdma)
{
	if (rdma->qp != NULL)
		rdma->verbs->qp_free(rdma->qp);
	if (rdma->cq != NULL)
		rdma->verbs->cq_free(rdma->cq);
	if (rdma->bounce_mr != NULL)
		rdma->verbs->mr_free(rdma->bounce_mr);
	if (rdma->bounce != NULL)
		munmap(rdma->bounce, rdma->bounce_bytes);
	iswi_tq_fini(&rdma->tq);
	free(rdma->slot);
	iswi_rdma_places_leave(rdma->places);
	iswi_rdma_domain_leave(rdma->domain);
	free(rdma);
}

static void rdma_destroy(struct iswi_queue *queue)
{
	struct iswi_rdma *rdma = rdma_of(iswi_tq_of(queue));

	if (rdma->started)
		iswi_tq_join(&rdma->tq);
	rdma_free(rdma);
}

/* --------------------------------------------------------------- making, connecting */

static int make_bounce(struct iswi_rdma *rdma, uint32_t request_bytes_max, struct isw_error *error)
{
	struct iswi_verbs_key key;
	void *memory;
	int code;

	rdma->bounce_bytes = ISWI_MAX(RDMA_BOUNCE_BYTES, request_bytes_max);
	memory = mmap(NULL, rdma->bounce_bytes, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED)
		return iswi_error(error, -errno, "no memory for an RDMA connection");
	/* A child between fork and exec must not get copies of pages the device writes to. */
	madvise(memory, rdma->bounce_bytes, MADV_DONTFORK);
	rdma->bounce = memory;
	code = rdma->verbs->mr_make(rdma->domain->pd, memory, rdma->bounce_bytes, 0,
				    &rdma->bounce_mr, &key);
	if (code != 0)
		return iswi_rdma_memory_error(code, "a connection's memory", error);
	rdma->bounce_lkey = key.local;
	return 0;
}

static int make_queue_pair(struct iswi_rdma *rdma, struct isw_rdma_end *end_out,
			   struct isw_error *error)
{
	const struct iswi_verbs_qp_config config = {
		.port = rdma->choice.port,
		.gid_index = rdma->choice.gid_index,
		.sends_max = rdma->depth,
	};
	int code = iswi_verbs_psn(&rdma->psn);

	*end_out = rdma->choice.end;
	end_out->psn = rdma->psn;
	/* After an error every transfer completes, signalled or not. One more is the probe. */
	if (code == 0)
		code = rdma->verbs->cq_make(rdma->domain->dev, rdma->depth + 1, &rdma->cq,
					    &rdma->cq_fd);
	if (code == 0)
		code = rdma->verbs->qp_make(rdma->domain->pd, rdma->cq, &config, &rdma->qp,
					    &end_out->number);
	if (code != 0)
		return iswi_error(error, code, "RDMA device %s gives no connection: %s%s",
				  rdma->choice.device, strerror(-code),
				  code == -ENOMEM ? " (ulimit -l, LimitMEMLOCK=infinity)" : "");
	return 0;
}

int iswi_rdma_make(const struct iswi_rdma_config *config, struct iswi_queue **queue_out,
		   struct isw_rdma_end *end_out, struct isw_error *error)
{
	struct iswi_rdma *rdma;
	int code;

	if (config->depth == 0 || config->depth > ISWI_RDMA_DEPTH_MAX)
		return iswi_error(error, -EINVAL, "queue depth %u is not between 1 and %u",
				  config->depth, ISWI_RDMA_DEPTH_MAX);
	rdma = calloc(1, sizeof(*rdma));
	if (rdma == NULL)
		return iswi_error(error, -ENOMEM, "no memory for an RDMA connection");
	code = iswi_tq_init(&rdma->tq, &iswi_transport_rdma, config->clock);
	if (code != 0) {
		free(rdma);
		return iswi_error(error, code, "no descriptor for an RDMA connection");
	}
	rdma->verbs = config->domain->domains->verbs;
	rdma->domain = config->domain;
	rdma->places = config->places;
	iswi_rdma_domain_hold(rdma->domain);
	iswi_rdma_places_hold(rdma->places);
	rdma->choice = *config->choice;
	rdma->slab_bytes = config->slab_bytes;
	rdma->depth = config->depth;
	snprintf(rdma->thread_name, sizeof(rdma->thread_name), "%s", config->thread_name);
	rdma->slot = calloc(rdma->depth, sizeof(*rdma->slot));
	if (rdma->slot == NULL)
		code = iswi_error(error, -ENOMEM, "no memory for an RDMA connection");
	else
		code = make_bounce(rdma, config->request_bytes_max, error);
	if (code == 0)
		code = make_queue_pair(rdma, end_out, error);
	if (code != 0) {
		rdma_free(rdma);
		return code;
	}
	/* With one processor, spinning would keep a device in software from working. */
	rdma->spin_ns_max = sysconf(_SC_NPROCESSORS_ONLN) > 1 ? RDMA_SPIN_NS_MAX : 0;
	rdma->spin_ns = rdma->spin_ns_max / 2;
	*queue_out = &rdma->tq.base;
	return 0;
}

/* Reads one page over the connection, which no port, firewall or MTU may prevent. */
static int probe(struct iswi_rdma *rdma, const struct isw_rdma_key *key, uint64_t deadline_ns,
		 struct isw_error *error)
{
	const struct iswi_verbs_post post = {
		.signalled = true,
		.length = ISW_PAGE_BYTES,
		.local = rdma->bounce,
		.lkey = rdma->bounce_lkey,
		.remote = key->address,
		.rkey = key->rkey,
	};
	const struct timespec pause = {.tv_nsec = 200000};
	struct iswi_verbs_done done;
	uint32_t one = 1;
	int code = rdma->verbs->post(rdma->qp, &post, &one);

	if (code != 0)
		return iswi_error(error, code, "the RDMA connection takes no request: %s",
				  strerror(-code));
	while ((code = rdma->verbs->poll(rdma->cq, &done, 1)) == 0) {
		if (iswi_now_ns() >= deadline_ns)
			return iswi_error(error, -ETIMEDOUT,
					  "no answer over RDMA: is UDP port 4791 open, and the MTU "
					  "the same all the way?");
		nanosleep(&pause, NULL);
	}
	if (code > 0)
		code = done.error;
	if (code == -ETIMEDOUT)
		return iswi_error(
			error, code,
			"no answer over RDMA: is UDP port 4791 open, and the MTU the same "
			"all the way?");
	if (code != 0)
		return iswi_error(error, code, "the other end refuses us over RDMA: %s",
				  strerror(-code));
	return 0;
}

int iswi_rdma_connect(struct iswi_queue *queue, const struct isw_rdma_end *peer,
		      const struct isw_rdma_key *key, uint32_t connect_ms_max,
		      uint32_t request_ms_max, const struct iswi_queue_events *events,
		      struct isw_error *error)
{
	struct iswi_rdma *rdma = rdma_of(iswi_tq_of(queue));
	uint64_t deadline_ns = iswi_now_ns() + connect_ms_max * NS_PER_MS;
	struct iswi_verbs_path path;
	int code;

	code = iswi_verbs_meet(&rdma->choice, rdma->psn, peer, &path, error);
	if (code != 0)
		return code;
	path.give_up_ms = request_ms_max;
	code = rdma->verbs->qp_connect(rdma->qp, &path);
	if (code != 0)
		return iswi_error(error, code, "RDMA device %s cannot connect: %s",
				  rdma->choice.device, strerror(-code));
	code = probe(rdma, key, deadline_ns, error);
	if (code != 0)
		return code;
	iswi_tq_begin(&rdma->tq, events, request_ms_max);
	code = iswi_thread_start(&rdma->tq.thread, rdma->thread_name, iswi_rdma_receiver, rdma);
	if (code != 0)
		return iswi_error(error, code, "no thread for an RDMA connection: %s",
				  strerror(-code));
	rdma->started = true;
	return 0;
}

/* Takes the queue `number` out of the offer. */
static int rdma_connect(const isw_engine *engine, const struct isw_remote_config *config,
			uint32_t number, uint32_t transfer_bytes_max,
			const struct iswi_queue_events *events, struct iswi_queue **queue_out,
			struct isw_error *error)
{
	isw_rdma_offer *offer = config->rdma;
	int code;

	(void)transfer_bytes_max; /* any length goes through the bounce buffer of the offer */
	if (offer->engine != engine || offer->count != config->queues)
		return iswi_error(error, -EINVAL, "an RDMA offer of %u connections, not %u",
				  offer->count, config->queues);
	code = iswi_rdma_connect(offer->queues[number], &config->rdma_peers[number],
				 &config->rdma_probe, config->connect_ms_max,
				 config->request_ms_max, events, error);
	if (code != 0)
		return code;
	*queue_out = offer->queues[number];
	offer->queues[number] = NULL;
	return 0;
}

static int rdma_place(struct iswi_queue *queue, uint32_t slot, const struct isw_rdma_key *key)
{
	return iswi_rdma_places_set(rdma_of(iswi_tq_of(queue))->places, slot, key);
}

static bool rdma_is_leaving(struct iswi_queue *queue)
{
	return atomic_load(&rdma_of(iswi_tq_of(queue))->domain->leaving);
}

const struct iswi_transport_ops iswi_transport_rdma = {
	.name = "rdma",
	.kind = ISW_TRANSPORT_RDMA,
	.witness = &iswi_transport_tcp,
	.connect = rdma_connect,
	.place = rdma_place,
	.is_leaving = rdma_is_leaving,
	.submit = rdma_submit,
	.shutdown = iswi_tq_shutdown,
	.destroy = rdma_destroy,
};
