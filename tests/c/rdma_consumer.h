/* SPDX-License-Identifier: Apache-2.0 */
/* A store, and a consumer that is bare verbs and does as it pleases. */
#ifndef ISW_TEST_RDMA_CONSUMER_H
#define ISW_TEST_RDMA_CONSUMER_H

#include "rdma_fixture.h"

#define SLAB_BYTES (16u * ISW_PAGE_BYTES)
#define SLABS      6u
#define QUEUES     2u

/* A consumer: connections to one lease. */
struct consumer {
	struct iswi_verbs_choice choice;
	struct iswi_vdev *dev;
	struct iswi_vpd *pd;
	struct iswi_vcq *cq;
	struct iswi_vqp *qp[QUEUES];
	struct isw_rdma_end ends[QUEUES], peers[QUEUES];
	struct isw_rdma_key probe;
	struct iswi_vmr *mr;
	struct iswi_verbs_key key;
	char *page;
};

static const struct iswi_verbs *verbs;
static const char *host;

static isw_store *store_make(uint32_t slabs)
{
	const struct isw_store_config config = {
		.slab_bytes = SLAB_BYTES,
		.slabs_max = SLABS,
		.leases_max = 4,
		.connections_max = 16,
		.connections_per_lease_max = 16,
		.handshake_ms_max = 1000,
		.send_ms_max = 1000,
	};
	struct isw_error error = {0};
	isw_store *store;

	CHECK_EQ(isw_store_create(&config, &store, &error), 0);
	iswi_store_verbs_set(store, verbs);
	for (uint32_t i = 0; i < slabs; i++)
		CHECK_EQ(isw_store_preallocate(store, &error), 0);
	return store;
}

static uint64_t lease_make(isw_store *store)
{
	char token[ISW_TOKEN_TEXT_BYTES];
	uint64_t lease;

	CHECK_EQ(isw_store_lease_create(store, SLABS, token, &lease, NULL), 0);
	return lease;
}

static void consumer_make(struct consumer *c)
{
	struct iswi_verbs_qp_config config = {.sends_max = 4};

	memset(c, 0, sizeof(*c));
	c->page = rig_pages(ISW_PAGE_BYTES);
	CHECK_EQ(iswi_verbs_choose(verbs, host, &c->choice, NULL), 0);
	CHECK_EQ(verbs->open(c->choice.device, &c->dev, NULL), 0);
	CHECK_EQ(verbs->pd_make(c->dev, &c->pd), 0);
	CHECK_EQ(verbs->cq_make(c->dev, 16, &c->cq, NULL), 0);
	CHECK_EQ(verbs->mr_make(c->pd, c->page, ISW_PAGE_BYTES, 0, &c->mr, &c->key), 0);
	config.port = c->choice.port;
	config.gid_index = c->choice.gid_index;
	for (uint32_t i = 0; i < QUEUES; i++) {
		c->ends[i] = c->choice.end;
		CHECK_EQ(iswi_verbs_psn(&c->ends[i].psn), 0);
		CHECK_EQ(verbs->qp_make(c->pd, c->cq, &config, &c->qp[i], &c->ends[i].number), 0);
	}
}

static void consumer_connect(struct consumer *c, isw_store *store, uint64_t lease)
{
	struct iswi_verbs_path path;
	struct isw_error error = {0};

	if (isw_store_rdma_open(store, lease, c->ends, QUEUES, c->peers, &c->probe, &error)) {
		fprintf(stderr, "%s\n", error.text);
		CHECK(0);
	}
	for (uint32_t i = 0; i < QUEUES; i++) {
		CHECK_EQ(iswi_verbs_meet(&c->choice, c->ends[i].psn, &c->peers[i], &path, &error),
			 0);
		CHECK_EQ(verbs->qp_connect(c->qp[i], &path), 0);
	}
}

static void consumer_free(struct consumer *c)
{
	for (uint32_t i = 0; i < QUEUES; i++)
		CHECK_EQ(verbs->qp_free(c->qp[i]), 0);
	CHECK_EQ(verbs->mr_free(c->mr), 0);
	verbs->cq_free(c->cq);
	verbs->pd_free(c->pd);
	verbs->close(c->dev);
	free(c->page);
}

static int transfer(struct consumer *c, uint32_t queue, bool write, uint64_t address, uint32_t rkey)
{
	const struct iswi_verbs_post post = {
		.write = write,
		.signalled = true,
		.length = ISW_PAGE_BYTES,
		.local = c->page,
		.lkey = c->key.local,
		.remote = address,
		.rkey = rkey,
	};
	struct iswi_verbs_done done;
	uint32_t one = 1;
	int count;

	CHECK_EQ(verbs->post(c->qp[queue], &post, &one), 0);
	for (uint32_t i = 0; (count = verbs->poll(c->cq, &done, 1)) == 0; i++) {
		CHECK(i < WAIT_S * 10000);
		usleep(100);
	}
	CHECK_EQ(count, 1);
	return done.error;
}

static uint32_t map_slab(isw_store *store, uint64_t lease, uint64_t *generation_out,
			 struct isw_rdma_key *key_out)
{
	uint32_t slot;

	CHECK_EQ(isw_store_map(store, lease, 0, &slot, generation_out), 0);
	CHECK_EQ(isw_store_rdma_key(store, lease, slot, *generation_out, 0, key_out, NULL), 0);
	return slot;
}

static struct isw_store_stats stats_of(isw_store *store)
{
	struct isw_store_stats stats;

	isw_store_stats(store, &stats);
	return stats;
}

/* Threads that do everything at once. */
struct race {
	isw_store *store;
	uint64_t lease;
	atomic_bool stop;
	struct consumer *consumer;
};

static void *register_ahead(void *arg)
{
	struct race *race = arg;

	while (!atomic_load(&race->stop)) {
		int code = isw_store_rdma_ahead(race->store, NULL);

		CHECK(code == 0 || code == -ENOENT);
	}
	return NULL;
}

#endif
