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

static const struct iswi_verbs *verbs;
static const char *host;

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

/* A store with a lease, and its consumer, which is not connected yet. */
struct scene {
	struct fixture f;
	uint64_t lease;
	char token[ISW_TOKEN_TEXT_BYTES];
	struct consumer c;
	int live;         /* objects of the stub's by now */
	atomic_bool stop; /* for threads that do everything at once */
};

static isw_store *scene_begin(struct scene *s, uint32_t slabs)
{
	set_up(&s->f, SLAB_BYTES, slabs);
	iswi_store_verbs_set(s->f.store, verbs);
	CHECK_EQ(isw_store_lease_create(s->f.store, SLABS, s->token, &s->lease, NULL), 0);
	consumer_make(&s->c);
	s->live = stub.live;
	atomic_init(&s->stop, false);
	return s->f.store;
}

static isw_store *scene_connected(struct scene *s, uint32_t slabs)
{
	isw_store *store = scene_begin(s, slabs);

	consumer_connect(&s->c, store, s->lease);
	return store;
}

static void scene_end(struct scene *s)
{
	consumer_free(&s->c);
	tear_down(&s->f);
}

/* With other connections. */
static void come_back(struct scene *s)
{
	consumer_free(&s->c);
	consumer_make(&s->c);
	consumer_connect(&s->c, s->f.store, s->lease);
}

static int key_of(struct scene *s, struct mapped m, uint32_t at_hand, struct isw_rdma_key *key_out)
{
	return isw_store_rdma_key(s->f.store, s->lease, m.slot, m.generation, at_hand, key_out,
				  NULL);
}

static struct mapped map_key(struct scene *s, struct isw_rdma_key *key_out)
{
	struct mapped m = map_slab(&s->f, s->lease);

	CHECK_EQ(key_of(s, m, 0, key_out), 0);
	return m;
}

/* A page of the slab's start. */
static int reach(struct scene *s, uint32_t queue, bool write, const struct isw_rdma_key *key)
{
	return transfer(&s->c, queue, write, key->address, key->rkey);
}

/* Another lease's connections, or this one's again, which the consumer does not use. */
static int open_again(struct scene *s, uint64_t lease)
{
	struct isw_rdma_end peers[QUEUES];
	struct isw_rdma_key probe;

	return isw_store_rdma_open(s->f.store, lease, s->c.ends, QUEUES, peers, &probe, NULL);
}

static void *register_ahead(void *arg)
{
	struct scene *s = arg;

	while (!atomic_load(&s->stop)) {
		int code = isw_store_rdma_ahead(s->f.store, NULL);

		CHECK(code == 0 || code == -ENOENT);
	}
	return NULL;
}

static void race_end(struct scene *s, pthread_t *threads, uint32_t count)
{
	atomic_store(&s->stop, true);
	for (uint32_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	CHECK_EQ(stats_of(&s->f).rdma_regions, 0);
	scene_end(s);
}

#endif
