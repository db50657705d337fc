/* SPDX-License-Identifier: Apache-2.0 */
/* A store, and a consumer that is bare verbs and does as it pleases. */
#ifndef ISW_TEST_RDMA_CONSUMER_H
#define ISW_TEST_RDMA_CONSUMER_H

#include "rdma_fixture.h"
#include "store_fixture.h"

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

static void consumer_make(struct consumer *c)
{
	struct iswi_verbs_qp_config config = {.sends_max = 4};

	memset(c, 0, sizeof(*c));
	c->page = rig_pages(ISW_PAGE_BYTES);
	CHECK_EQ(iswi_verbs_choose(rig_verbs(), rig_host(), &c->choice, NULL), 0);
	CHECK_EQ(rig_verbs()->open(c->choice.device, &c->dev, NULL), 0);
	CHECK_EQ(rig_verbs()->pd_make(c->dev, &c->pd), 0);
	CHECK_EQ(rig_verbs()->cq_make(c->dev, 16, &c->cq, NULL), 0);
	CHECK_EQ(rig_verbs()->mr_make(c->pd, c->page, ISW_PAGE_BYTES, 0, &c->mr, &c->key), 0);
	config.port = c->choice.port;
	config.gid_index = c->choice.gid_index;
	for (uint32_t i = 0; i < QUEUES; i++) {
		c->ends[i] = c->choice.end;
		CHECK_EQ(iswi_verbs_psn(&c->ends[i].psn), 0);
		CHECK_EQ(rig_verbs()->qp_make(c->pd, c->cq, &config, &c->qp[i], &c->ends[i].number),
			 0);
	}
}

static void consumer_connect(struct consumer *c, uint64_t of_lease)
{
	struct iswi_verbs_path path;
	struct isw_error error = {0};

	if (isw_store_rdma_open(store, of_lease, c->ends, QUEUES, c->peers, &c->probe, &error)) {
		fprintf(stderr, "%s\n", error.text);
		CHECK(0);
	}
	for (uint32_t i = 0; i < QUEUES; i++) {
		CHECK_EQ(iswi_verbs_meet(&c->choice, c->ends[i].psn, &c->peers[i], &path, &error),
			 0);
		CHECK_EQ(rig_verbs()->qp_connect(c->qp[i], &path), 0);
	}
}

static void consumer_free(struct consumer *c)
{
	for (uint32_t i = 0; i < QUEUES; i++)
		CHECK_EQ(rig_verbs()->qp_free(c->qp[i]), 0);
	CHECK_EQ(rig_verbs()->mr_free(c->mr), 0);
	rig_verbs()->cq_free(c->cq);
	rig_verbs()->pd_free(c->pd);
	rig_verbs()->close(c->dev);
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

	CHECK_EQ(rig_verbs()->post(c->qp[queue], &post, &one), 0);
	for (uint32_t i = 0; (count = rig_verbs()->poll(c->cq, &done, 1)) == 0; i++) {
		CHECK(i < WAIT_S * 10000);
		usleep(100);
	}
	CHECK_EQ(count, 1);
	return done.error;
}

/* A store with a lease, and its consumer. */
static uint64_t lease;
static char ticket[ISW_TICKET_TEXT_BYTES];
static struct consumer consumer;
static int live;         /* objects of the stub's at first */
static atomic_bool stop; /* for threads that do everything at once */

/* The consumer is not connected yet. */
static void scene_begin(uint32_t slabs)
{
	set_up(SLAB_BYTES, slabs);
	iswi_store_verbs_set(store, rig_verbs());
	CHECK_EQ(lease_create(store, SLABS, ticket, &lease, NULL), 0);
	consumer_make(&consumer);
	live = stub.live;
	atomic_init(&stop, false);
}

static void scene_end(void)
{
	consumer_free(&consumer);
	tear_down();
}

#define SCENE_TEST(name, slabs) BETWEEN_TEST(name, scene_begin(slabs), scene_end())
#define CONNECTED_TEST(name, slabs)                                                                \
	BETWEEN_TEST(name, scene_begin(slabs); consumer_connect(&consumer, lease), scene_end())

/* With other connections. */
static void come_back(void)
{
	consumer_free(&consumer);
	consumer_make(&consumer);
	consumer_connect(&consumer, lease);
}

static int key_of(struct mapped m, uint32_t at_hand, struct isw_rdma_key *key_out)
{
	return isw_store_rdma_key(store, lease, m.slot, m.generation, at_hand, key_out, NULL);
}

static struct mapped map_key(struct isw_rdma_key *key_out)
{
	struct mapped m = map_slab(lease);

	CHECK_EQ(key_of(m, 0, key_out), 0);
	return m;
}

static int unmap(struct mapped m)
{
	return unmap_slab(lease, m, 100);
}

static int renew(void)
{
	return lease_renew(store, lease, WAIT_S * 1000, ticket);
}

/* A page of the slab's start. */
static int reach(uint32_t queue, bool write, const struct isw_rdma_key *key)
{
	return transfer(&consumer, queue, write, key->address, key->rkey);
}

/* Another lease's connections, or this one's again, which the consumer does not use. */
static int open_again(uint64_t of_lease)
{
	struct isw_rdma_end peers[QUEUES];
	struct isw_rdma_key probe;

	return isw_store_rdma_open(store, of_lease, consumer.ends, QUEUES, peers, &probe, NULL);
}

UNUSED_OK static void ahead(uint32_t slabs)
{
	for (uint32_t i = 0; i < slabs; i++)
		CHECK_EQ(isw_store_rdma_ahead(store, NULL), 0);
}

UNUSED_OK static void *register_ahead(void *arg)
{
	(void)arg;
	while (!atomic_load(&stop)) {
		int code = isw_store_rdma_ahead(store, NULL);

		CHECK(code == 0 || code == -ENOENT);
	}
	return NULL;
}

UNUSED_OK static void race_begin(pthread_t *threads, void *(*const *beside)(void *), uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, beside[i], NULL), 0);
}

UNUSED_OK static void race_end(const pthread_t *threads, uint32_t count)
{
	atomic_store(&stop, true);
	for (uint32_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	CHECK_EQ(store_stats().rdma_regions, 0);
}

#endif
