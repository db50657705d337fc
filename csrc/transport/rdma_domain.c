/* SPDX-License-Identifier: Apache-2.0 */
/* The RDMA devices that an engine has open, each shared by all queues through it. */
#include <errno.h>
#include <string.h>

#include "transport/rdma_internal.h"

int iswi_rdma_memory_error(int code, const char *what, struct isw_error *error)
{
	if (code == -ENOMEM)
		return iswi_error(error, code,
				  "%s cannot be registered with the RDMA device: too little memory "
				  "may be locked (ulimit -l, LimitMEMLOCK=infinity)",
				  what);
	return iswi_error(error, code, "%s cannot be registered with the RDMA device: %s", what,
			  strerror(-code));
}

void iswi_rdma_domains_init(struct iswi_rdma_domains *domains)
{
	domains->verbs = &iswi_verbs_system;
	pthread_mutex_init(&domains->lock, NULL);
	for (uint32_t i = 0; i < ISWI_RDMA_DOMAINS_MAX; i++)
		domains->domain[i].domains = domains;
}

static void close_domain(struct iswi_rdma_domain *domain)
{
	const struct iswi_verbs *verbs = domain->domains->verbs;

	if (domain->mr != NULL)
		verbs->mr_free(domain->mr);
	if (domain->pd != NULL)
		verbs->pd_free(domain->pd);
	if (domain->dev != NULL)
		verbs->close(domain->dev);
	domain->mr = NULL;
	domain->pd = NULL;
	domain->dev = NULL;
}

static int open_domain(struct iswi_rdma_domain *domain, const char *device, void *memory,
		       uint64_t bytes, struct isw_error *error)
{
	const struct iswi_verbs *verbs = domain->domains->verbs;
	struct iswi_verbs_key key = {0};
	int code = verbs->open(device, &domain->dev, error);

	if (code != 0)
		return code;
	code = verbs->pd_make(domain->dev, &domain->pd);
	if (code != 0) {
		iswi_error(error, code, "RDMA device %s gives no protection domain: %s", device,
			   strerror(-code));
		goto err;
	}
	code = verbs->mr_make(domain->pd, memory, bytes, 0, &domain->mr, &key);
	if (code != 0) {
		iswi_rdma_memory_error(code, "the staging memory", error);
		goto err;
	}
	domain->memory = memory;
	domain->bytes = bytes;
	domain->lkey = key.local;
	domain->failed = false;
	atomic_store(&domain->leaving, false);
	memcpy(domain->device, device, sizeof(domain->device));
	return 0;
err:
	close_domain(domain);
	return code;
}

int iswi_rdma_domain_join(struct iswi_rdma_domains *domains, const char *device, void *memory,
			  uint64_t bytes, struct iswi_rdma_domain **domain_out,
			  struct isw_error *error)
{
	struct iswi_rdma_domain *found = NULL, *room = NULL;
	int code = 0;

	pthread_mutex_lock(&domains->lock);
	for (uint32_t i = 0; i < ISWI_RDMA_DOMAINS_MAX && found == NULL; i++) {
		struct iswi_rdma_domain *one = &domains->domain[i];

		if (one->users == 0)
			room = one;
		else if (!one->failed && strcmp(one->device, device) == 0)
			found = one;
	}
	if (found == NULL && room == NULL)
		code = iswi_error(error, -ENOSPC, "the device uses %u RDMA devices already",
				  ISWI_RDMA_DOMAINS_MAX);
	else if (found == NULL)
		code = open_domain(found = room, device, memory, bytes, error);
	if (code == 0) {
		found->users++;
		*domain_out = found;
	}
	pthread_mutex_unlock(&domains->lock);
	return code;
}

void iswi_rdma_domain_hold(struct iswi_rdma_domain *domain)
{
	pthread_mutex_lock(&domain->domains->lock);
	domain->users++;
	pthread_mutex_unlock(&domain->domains->lock);
}

void iswi_rdma_domain_leave(struct iswi_rdma_domain *domain)
{
	if (domain == NULL)
		return;
	pthread_mutex_lock(&domain->domains->lock);
	if (--domain->users == 0)
		close_domain(domain);
	pthread_mutex_unlock(&domain->domains->lock);
}

void iswi_rdma_domain_fail(struct iswi_rdma_domain *domain)
{
	pthread_mutex_lock(&domain->domains->lock);
	domain->failed = true;
	pthread_mutex_unlock(&domain->domains->lock);
}

uint32_t iswi_rdma_domains_look(struct iswi_rdma_domains *domains)
{
	uint32_t count = 0;

	pthread_mutex_lock(&domains->lock);
	for (uint32_t i = 0; i < ISWI_RDMA_DOMAINS_MAX; i++) {
		struct iswi_rdma_domain *one = &domains->domain[i];

		if (one->users == 0 || atomic_load(&one->leaving) ||
		    !domains->verbs->is_leaving(one->dev))
			continue;
		atomic_store(&one->leaving, true);
		one->failed = true;
		count++;
	}
	pthread_mutex_unlock(&domains->lock);
	return count;
}
