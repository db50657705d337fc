/* SPDX-License-Identifier: Apache-2.0 */
/* The consumer's half of RDMA connections to a donor: made, told to it by Python, then connected.
 */
#include <errno.h>
#include <stdlib.h>

#include "transport/rdma_internal.h"

#define RDMA_DEPTH 256u

/* Chooses the port, and gives the offer its domain and places, or after an error some of them. */
static int prepare(isw_rdma_offer *offer, const struct iswi_rdma_offer_config *config,
		   struct iswi_verbs_choice *choice_out, struct isw_error *error)
{
	int code = iswi_verbs_choose(config->domains->verbs, config->host, choice_out, error);

	if (code == 0)
		code = iswi_rdma_domain_join(config->domains, choice_out->device, config->memory,
					     config->memory_bytes, &offer->domain, error);
	if (code == 0 && iswi_rdma_places_make(config->slots, &offer->places) != 0)
		code = iswi_error(error, -ENOMEM, "no memory for RDMA");
	return code;
}

int iswi_rdma_offer_make(const struct iswi_rdma_offer_config *config, isw_rdma_offer **offer_out,
			 struct isw_error *error)
{
	struct iswi_verbs_choice choice;
	struct iswi_rdma_config queue = {
		.choice = &choice,
		.slab_bytes = config->slab_bytes,
		.depth = RDMA_DEPTH,
		.request_bytes_max = config->request_bytes_max,
		.thread_name = "isw-rdma",
	};
	isw_rdma_offer *offer;
	int code;

	if (config->queues == 0 || config->queues > ISW_RDMA_QUEUES_MAX || config->slots == 0)
		return iswi_error(error, -EINVAL, "a donor takes 1 to %u connections, not %u",
				  ISW_RDMA_QUEUES_MAX, config->queues);
	offer = calloc(1, sizeof(*offer));
	if (offer == NULL)
		return iswi_error(error, -ENOMEM, "no memory for RDMA");
	offer->engine = config->engine;
	code = prepare(offer, config, &choice, error);
	queue.domain = offer->domain;
	queue.places = offer->places;
	while (code == 0 && offer->count < config->queues) {
		code = iswi_rdma_make(&queue, &offer->queues[offer->count],
				      &offer->ends[offer->count], error);
		if (code == 0)
			offer->count++;
		else if (code != -ENOMEM)
			iswi_rdma_domain_fail(offer->domain);
	}
	if (code != 0)
		isw_rdma_offer_destroy(offer);
	else
		*offer_out = offer;
	return code;
}

void isw_rdma_offer_end(const isw_rdma_offer *offer, uint32_t queue, struct isw_rdma_end *end_out)
{
	*end_out = offer->ends[queue];
}

void isw_rdma_offer_destroy(isw_rdma_offer *offer)
{
	if (offer == NULL)
		return;
	for (uint32_t i = 0; i < offer->count; i++)
		if (offer->queues[i] != NULL)
			offer->queues[i]->ops->destroy(offer->queues[i]);
	iswi_rdma_places_leave(offer->places);
	iswi_rdma_domain_leave(offer->domain);
	free(offer);
}
